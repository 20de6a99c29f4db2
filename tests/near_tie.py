"""Two texts of the same model may part only where two tokens were almost equally likely."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import numpy as np
from skippy_orchestrator.deployment import ModelSection
from skippy_stage.engines import create_engine
from skippy_stage.engines.base import Batch, SequenceRows, StageEngine
from skippy_stage.protocol import SamplingParams
from skippy_stage.sampling import gumbel
from skippy_stage.settings import StageSettings

from tests.golden import NearTie


@cache
def _whole_model() -> StageEngine:
    return create_engine(
        StageSettings(
            name="reference", model=ModelSection().path, first_layer=0, last_layer=30, kv_tokens=8192
        )
    )


def assert_same_text(
    prompt: Sequence[int],
    expected: Sequence[int],
    tokens: Sequence[int],
    tie: float,
    what: str,
    sampling: SamplingParams | None = None,
) -> None:
    """Fail unless ``tokens`` are ``expected``, or leave them at a near tie, which is shown as a warning.

    A near tie is where the scores of the two tokens (their logits, for greedy texts) are less than ``tie``
    apart when the model computes them once more, on its own. What comes after it is not compared.
    """
    if list(tokens) == list(expected):
        return
    pairs = list(zip(tokens, expected, strict=False))
    at = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))
    assert at < len(pairs), f"{what}: {len(tokens)} tokens instead of {len(expected)}"
    mine, theirs = pairs[at]
    first, second = _scores([*prompt, *expected[:at]], (mine, theirs), sampling or SamplingParams())
    where = f"{what}: token {at} is {mine} instead of {theirs}; scores {first:.5f} and {second:.5f}"
    assert abs(first - second) < tie, where
    warnings.warn(NearTie(where), stacklevel=2)


def _scores(tokens: Sequence[int], of: tuple[int, int], sampling: SamplingParams) -> tuple[float, float]:
    """What decides between two tokens after these ones: logits, over the temperature and with noise if sampled."""
    engine = _whole_model()
    engine.open(1, len(tokens))
    try:
        rows = [SequenceRows(1, 0, len(tokens), 1)]
        logits = engine.forward(Batch(rows, np.array(tokens, np.int32))).logits
    finally:
        engine.close(1)
    assert logits is not None
    ids = np.array(of, np.int64)
    scores = logits[0, ids].astype(np.float64)
    if not sampling.greedy:
        scores = scores / sampling.temperature + gumbel(
            sampling.seed, sampling.sample_index, len(tokens), ids
        )
    return float(scores[0]), float(scores[1])
