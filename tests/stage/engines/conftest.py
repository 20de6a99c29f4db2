"""Tiny checkpoints and loaded engines, each made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from skippy_stage.engines import prepare_environment

prepare_environment()  # before anything below imports torch

from tests.stage.engines.driving import Chain  # noqa: E402
from tests.stage.engines.tiny import LAYERS, make_folder  # noqa: E402
from tests.stage.engines.variants import Variant, parameters  # noqa: E402

MakeChain = Callable[..., Chain]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama."""
    return make_folder(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module", params=parameters())
def variant(request: pytest.FixtureRequest) -> Variant:
    """One of the engines."""
    chosen: Variant = request.param
    return chosen


@pytest.fixture(scope="module")
def make_chain(variant: Variant, tiny_llama: Path) -> Iterator[MakeChain]:
    """Makes the tiny model out of stages that are cut at the given layers; they end with the module."""
    made: list[Chain] = []

    def make(*cuts: int, **settings: object) -> Chain:
        ranges = pairwise([0, *cuts, LAYERS])
        chain = Chain([variant.make(tiny_llama, first, last, **settings) for first, last in ranges])
        made.append(chain)
        return chain

    yield make
    for chain in made:
        chain.shutdown()


@pytest.fixture(scope="module")
def _whole(make_chain: MakeChain) -> Chain:
    return make_chain()


@pytest.fixture
def whole(_whole: Chain) -> Iterator[Chain]:
    """The tiny model as one stage; every test must leave it empty."""
    yield _whole
    _whole.close(*_whole.stages[0].usage().cached)
    _whole.check_empty()
