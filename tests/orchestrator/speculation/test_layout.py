"""Where windows lie and which of their inputs stand in the text: rows *layout* and *retire* of spec 12.12."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from skippy_orchestrator.deployment.speculation import NgramSection, SpeculationPlan, VerifyWindowSection
from skippy_orchestrator.speculation.machine import DecodeMachine
from skippy_orchestrator.speculation.options import SpeculationOptions
from skippy_orchestrator.speculation.proposers.statistics import ProposerStats

PROMPT, CURRENT = 100, 10


class Fixed:
    """Proposes the same tokens once, and then nothing."""

    name = "fixed"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.stats = ProposerStats()
        self._tokens = list(tokens)

    def follow(self, history: Sequence[int]) -> None:
        """Nothing to index."""

    def propose(self, continuation: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` tokens."""
        tokens, self._tokens = self._tokens[:limit], []
        return tokens


def machine(proposal: Sequence[int], *, width: int = 2) -> tuple[DecodeMachine, list[int]]:
    """P = 100 and D = 4: the first token and four decoded ones are there, the last of them is 10."""
    plan = SpeculationPlan(
        ngram=NgramSection(kind="suffix", min_ngram=3, max_ngram=8, max_proposal_tokens=16),
        verify_window=VerifyWindowSection(max_tokens=width, pipeline_depth=4),
        speculative_window=8,
    )
    context = [*range(1000, 1000 + PROMPT), 1, 2, 3, 4, CURRENT]
    options = SpeculationOptions(plan)
    return DecodeMachine(options, context, PROMPT, 64, (), Fixed(proposal), 0.0), context


def test_windows_of_an_epoch_tile_the_positions() -> None:
    decoder, _ = machine([11, 12, 13, 14])
    first, second = decoder.next(0.0), decoder.next(0.0)
    assert first is not None
    assert second is not None
    assert (first.pos_start, first.inputs, first.drafts) == (104, (10, 11, 12), (11, 12))
    assert (second.pos_start, second.inputs, second.drafts) == (107, (13, 14), (13, 14))
    assert decoder.next(0.0) is None


def test_no_pipeline_starts_without_a_horizon() -> None:
    """12.11, controller(0): nothing is proposed, so the next work is one token."""
    work = machine([])[0].next(0.0)
    assert work is not None
    assert (work.pos_start, work.inputs, work.drafts) == (104, (10,), ())


@pytest.mark.parametrize(
    ("predicted", "commit", "valid", "retires"),
    [
        ([11, 12, 13, 14], 4, 4, True),
        ([11, 12, 99, 14], 3, 3, False),
    ],
)
def test_inputs_that_stand_in_the_text(predicted: list[int], commit: int, valid: int, retires: bool) -> None:
    """(4, 4) and (3, 4): a first window of three drafts has four inputs."""
    decoder, _ = machine([11, 12, 13], width=3)
    work = decoder.next(0.0)
    assert work is not None
    answer = decoder.answered(predicted, (), 1.0)
    assert (len(answer.commit), answer.valid_inputs) == (commit, valid)
    assert (answer.valid_inputs == len(work.inputs)) is retires


def test_inputs_of_a_further_window_that_stand_in_the_text() -> None:
    """(5, 4): one of four drafts has four inputs, and commits the token behind them too."""
    decoder, context = machine([11, 12, 13, 14, 15, 16, 17, 18], width=4)
    decoder.next(0.0)
    work = decoder.next(0.0)
    assert work is not None
    first = decoder.answered([11, 12, 13, 14, 15], (), 1.0)
    assert first.commit == (11, 12, 13, 14)
    context += first.commit
    decoder.settle(first, 4, stopped=False)
    second = decoder.answered([16, 17, 18, 19], (), 2.0)
    assert (second.commit, second.valid_inputs, len(work.inputs)) == ((15, 16, 17, 18, 19), 4, 4)
