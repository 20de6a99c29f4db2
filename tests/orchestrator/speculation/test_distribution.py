"""Sampling without a seed of the client: guessing ahead does not change what is likely (spec 7)."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from skippy_orchestrator import sessions
from skippy_orchestrator.speculation.proposers import Proposer
from skippy_stage.protocol import SamplingParams
from skippy_stage.sampling import candidates

from tests.orchestrator.simulation import Simulation
from tests.orchestrator.speculation.test_in_core import PROMPT, Foresight, plan
from tests.scripted import logits_behind

PARAMS = SamplingParams(temperature=1.3, top_k=3)
DRAWS = 1200
TOKENS = 3
CHI_SQUARE_26 = 54.1
"""Of 26 degrees of freedom, exceeded by chance in one of a thousand runs; the seeds here are fixed."""


def expected() -> dict[tuple[int, ...], float]:
    """The probability of every text that the target can give."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, probability in found.items():
            logits = logits_behind([*PROMPT, *text])
            ids = candidates(logits, PARAMS)
            weights = np.exp(logits[ids].astype(np.float64) / PARAMS.temperature)
            for token, weight in zip(ids.tolist(), weights / weights.sum(), strict=True):
                longer[(*text, token)] = probability * float(weight)
        found = longer
    return found


def make_foresight(seed: int) -> Proposer:
    return Foresight(SamplingParams(temperature=PARAMS.temperature, top_k=PARAMS.top_k, seed=seed), 0.3, seed)


@pytest.mark.parametrize("depth", [1, 3])
def test_texts_are_as_likely_as_the_target_makes_them(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    probabilities = expected()
    assert len(probabilities) == 27
    seeds = itertools.count(1)
    monkeypatch.setattr(sessions, "make_proposer", lambda _: make_foresight(next(seeds)))
    random = np.random.default_rng(11)
    sim = Simulation(2)
    accepted = 0
    texts: Counter[tuple[int, ...]] = Counter()
    for session in range(1, DRAWS + 1):
        sampling = SamplingParams(
            temperature=PARAMS.temperature, top_k=PARAMS.top_k, seed=int(random.integers(2**63))
        )
        seen = sim.submit(
            session, PROMPT, TOKENS, sampling=sampling, speculation=plan(2, depth), seeded=False
        )
        sim.run()
        texts[tuple(seen.tokens)] += 1
        assert seen.speculation is not None
        accepted += seen.speculation.accepted_draft_tokens
    assert accepted > 0
    assert set(texts) <= set(probabilities)
    statistic = sum(
        (texts[text] - DRAWS * chance) ** 2 / (DRAWS * chance) for text, chance in probabilities.items()
    )
    assert statistic < CHI_SQUARE_26
