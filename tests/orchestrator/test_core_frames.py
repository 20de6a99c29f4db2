"""What is in a frame and in which order: ends first, then steps with their controls around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from skippy_orchestrator.deployment import PrefixCacheSection
from skippy_orchestrator.prefix.outcome import HitKind
from skippy_stage.errors import ErrorCode
from skippy_stage.protocol import (
    DecodeStep,
    OpenStep,
    PrefillStep,
    ProbeStep,
    RecordStep,
    Restorable,
    RestoreStep,
    Step,
    StepFailed,
    StepSkipped,
    StepStatus,
    StopStep,
)

from tests.orchestrator.by_hand import Hand

ON = PrefixCacheSection(min_tokens=4)


def failing(*kinds: type, message: str = "out of memory") -> Callable[[Step], StepStatus | None]:
    failed = StepFailed(code=ErrorCode.INTERNAL, message=message)
    return lambda step: failed if isinstance(step, kinds) else None


def test_a_finished_session_stops_at_the_head_of_the_next_frame() -> None:
    hand = Hand(2, prefix=ON)
    hand.submit(1, 5, 1)
    hand.submit(2, 6, 9)
    hand.send()
    hand.pass_through()
    (frame,) = hand.send()
    assert frame.steps == (StopStep(session=1), DecodeStep(session=2, epoch=0, pos_start=6))
    assert (frame.tokens, frame.ended, frame.decodes) == ((40,), (), True)


def test_what_it_computed_is_recorded_before_it_stops() -> None:
    hand = Hand(2, prefix=ON)
    hand.submit(1, 5, 2)
    (first,) = hand.send()
    assert isinstance(first.steps[0], OpenStep)
    assert first.steps[1:] == (
        PrefillStep(session=1, epoch=0, pos_start=0, rows=5, sample=True),
        RecordStep(session=1, epoch=0, length=5),
    )
    hand.pass_through()
    hand.send()
    hand.pass_through()
    assert not hand.core.idle, "the stages have not heard of the end"
    (last,) = hand.send()
    assert last.steps == (RecordStep(session=1, epoch=0, length=6), StopStep(session=1))
    assert (last.tokens, last.ended, last.decodes) == ((), (), False)
    assert not hand.core.idle
    hand.pass_through()
    assert hand.core.idle


def test_the_ends_of_several_sessions_come_before_everything_else() -> None:
    hand = Hand(2, prefix=ON, max_sessions=3)
    for session, n_prompt in ((1, 5), (2, 6), (3, 7)):
        hand.submit(session, n_prompt, 1 if session < 3 else 9)
    hand.submit(4, [90, 91, 92, 93], 9)
    hand.send()
    hand.pass_through()
    (frame,) = hand.send()
    assert [(type(step), step.session) for step in frame.steps] == [
        (StopStep, 1),
        (StopStep, 2),
        (DecodeStep, 3),
        (OpenStep, 4),
        (PrefillStep, 4),
        (RecordStep, 4),
    ]


def test_who_takes_a_freed_place_opens_behind_the_stop_in_the_same_frame() -> None:
    hand = Hand(2, max_sessions=1, blocks=2)
    hand.submit(1, 7, 1)
    hand.submit(2, 7, 1)
    hand.send()
    hand.pass_through()
    (frame,) = hand.send()
    assert [(type(step), step.session) for step in frame.steps] == [
        (StopStep, 1),
        (OpenStep, 2),
        (PrefillStep, 2),
    ]


def test_a_session_that_was_broken_off_ends_ahead_of_all_queued_work() -> None:
    hand = Hand(2)
    hand.submit(1, 40, 9)
    hand.submit(2, 5, 1)
    hand.send()
    hand.cancel(1)
    hand.pass_through()
    (frame,) = hand.send()
    assert (frame.ended, frame.steps) == ((1,), (StopStep(session=2),))
    assert hand.errors == {1: "cancelled by the client"}


@pytest.mark.parametrize("after", [False, True])
def test_a_cancel_after_the_end_is_too_late(after: bool) -> None:
    hand = Hand(2)
    hand.submit(1, 5, 1)
    hand.send()
    hand.pass_through()
    if after:
        hand.send()
    hand.cancel(1)
    hand.run()
    assert hand.errors == {}
    assert [commit.finish_reason for commit in hand.commits] == ["length"]
    assert hand.history.counters.cancelled == 0


def test_a_session_that_no_stage_knows_needs_no_end() -> None:
    hand = Hand(2, max_sessions=1)
    hand.submit(1, 5)
    hand.submit(2, 5)
    hand.cancel(1)
    hand.cancel(2)
    (announcement,) = hand.send()
    assert (announcement.steps, announcement.ended) == ((), ())
    hand.run()
    assert hand.history.counters.cancelled == 2


def test_a_failed_step_ends_its_session_alone() -> None:
    hand = Hand(2)
    hand.submit(1, 5, 9)
    hand.submit(2, 5, 9)
    hand.send()
    hand.leave(1)
    hand.done(1, override=lambda s: failing(PrefillStep)(s) if s.session == 1 else None)
    assert hand.errors == {1: "out of memory"}
    (frame,) = hand.send()
    assert (frame.ended, [step.session for step in frame.steps]) == ((1,), [2])
    assert hand.history.counters.failed == 1


def test_what_a_failed_session_still_has_in_flight_is_ignored() -> None:
    hand = Hand(2, credits=3, frames_per_link=3)
    hand.submit(1, 30, 9)
    assert len(hand.send()) == 3
    hand.leave(1)
    hand.done(1, override=failing(PrefillStep))
    for number in (2, 3):
        hand.leave(number)
        hand.done(number, override=lambda step: StepSkipped())
    hand.run()
    assert hand.errors == {1: "out of memory"}


def test_a_live_step_that_a_stage_skipped_is_a_fault() -> None:
    hand = Hand(2)
    hand.submit(1, 5, 9)
    hand.send()
    hand.leave(1)
    hand.done(1, override=lambda step: StepSkipped() if isinstance(step, PrefillStep) else None)
    assert hand.errors == {1: "a live step was skipped by a stage"}
    hand.run()


def test_failures_of_the_last_steps_of_a_finished_session_are_nobodys() -> None:
    hand = Hand(2, prefix=ON)
    hand.submit(1, 5, 2)
    hand.send()
    hand.pass_through()
    hand.send()
    hand.pass_through()
    (last,) = hand.send()
    assert [type(step) for step in last.steps] == [RecordStep, StopStep]
    hand.leave(3)
    hand.done(3, override=failing(RecordStep))
    assert hand.errors == {}
    assert hand.core.idle


# Probes and restores.


def known(hand: Hand, length: int) -> None:
    """A first session leaves its prompt of 20 tokens behind; from now on stages could restore so much."""
    hand.submit(1, 20, 3)
    hand.run()
    hand.commits.clear()
    hand.restorable = Restorable(length)


def test_a_question_goes_ahead_and_the_restore_rides_with_the_first_rows() -> None:
    hand = Hand(2, prefix=PrefixCacheSection(min_tokens=4, replay_tokens=0))
    known(hand, 12)
    hand.submit(2, 20, 3)
    (question,) = hand.send()
    assert [type(step) for step in question.steps] == [OpenStep, ProbeStep]
    assert question.tokens == tuple(range(20))
    assert not question.decodes
    assert hand.send() == []
    hand.pass_through()
    (frame,) = hand.send()
    assert frame.steps == (
        RestoreStep(session=2, epoch=0, length=12),
        PrefillStep(session=2, epoch=0, pos_start=12, rows=8, sample=True),
        RecordStep(session=2, epoch=0, length=20),
    )
    assert frame.tokens == tuple(range(12, 20))
    hand.run()
    counters = hand.history.counters
    assert (counters.prefix_queries, counters.prefix_hits, counters.hits_prefix) == (1, 1, 1)
    assert (counters.cached_tokens, counters.replayed_tokens) == (12, 0)


def test_a_session_that_replays_tokens_moves_straight_to_decoding() -> None:
    hand = Hand(2, prefix=ON)
    known(hand, 21)
    hand.submit(2, 20, 5)
    hand.send()
    hand.pass_through()
    assert [commit.tokens for commit in hand.commits] == [(40, 40)], (
        "of 3 known tokens 2 have their positions"
    )
    (frame,) = hand.send()
    assert frame.steps == (
        RestoreStep(session=2, epoch=0, length=21),
        DecodeStep(session=2, epoch=0, pos_start=21),
    )
    assert (frame.tokens, frame.decodes) == ((40,), True)
    hand.run()
    assert hand.history.counters.prefill_chunks == 3, "those of the first session"
    assert hand.commits[-1].cache is not None
    assert hand.commits[-1].cache.hit_kind is HitKind.EXACT_REPLAY


def test_a_session_that_ends_with_what_it_replays_has_only_asked() -> None:
    hand = Hand(2, prefix=ON)
    known(hand, 22)
    hand.submit(2, 20, 3)
    hand.send()
    hand.pass_through()
    assert [commit.finish_reason for commit in hand.commits] == ["length"]
    (frame,) = hand.send()
    assert frame.steps == (StopStep(session=2),)
    hand.run()
    assert hand.history.counters.replayed_tokens == 3


def test_a_question_that_fails_ends_its_session_with_the_stages_error() -> None:
    hand = Hand(2, prefix=ON)
    known(hand, 20)
    hand.submit(2, 20, 3)
    hand.send()
    number = max(hand.frames)
    hand.leave(number)
    hand.done(number, override=failing(ProbeStep, message="stage_1: no room for leases"))
    assert hand.errors == {2: "stage_1: no room for leases"}
    (frame,) = hand.send()
    assert (frame.ended, frame.steps) == ((2,), ())
    hand.run()


def test_a_restore_that_fails_ends_its_session_though_its_rows_were_skipped() -> None:
    hand = Hand(2, prefix=ON)
    known(hand, 12)
    hand.submit(2, 20, 3)
    hand.send()
    hand.pass_through()
    hand.send()
    number = max(hand.frames)
    hand.leave(number)

    def outcome(step: Step) -> StepStatus | None:
        failed = failing(RestoreStep, message="stage_0: lease is gone")(step)
        return failed or StepSkipped()

    hand.done(number, override=outcome)
    assert hand.errors == {2: "stage_0: lease is gone"}, "the first error is the one that is told"
    hand.run()


def test_a_step_that_was_lost_is_found() -> None:
    hand = Hand(2)
    hand.submit(1, 30, 3)
    hand.send()
    hand.core._running[1]._in_flight.pop()
    with pytest.raises(AssertionError, match="session 1 has lost a step"):
        hand.core.check_integrity()
