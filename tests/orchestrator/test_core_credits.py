"""When a chunk's credit returns: as soon as the second stage can start on its frame, and no earlier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.history import CoreCounters
from skippy_stage.protocol import DecodeStep

from tests.orchestrator.by_hand import Hand, chunks_in


def sent(hand: Hand) -> list[list[tuple[int, int]]]:
    """Chunks of the frames that can be built now."""
    return [chunks_in(frame) for frame in hand.send()]


def test_an_idle_second_stage_starts_when_a_frame_leaves_the_first() -> None:
    hand = Hand(2, credits=1, frames_per_link=3)
    hand.submit(1, 40)
    assert sent(hand) == [[(1, 0)]]
    assert hand.credits_out(1) == 1
    hand.leave(1)
    assert hand.credits_out(1) == 0
    assert sent(hand) == [[(1, 8)]]


@pytest.mark.parametrize("stages", [2, 3])
def test_a_busy_second_stage_starts_when_it_is_rid_of_the_frame_before(stages: int) -> None:
    hand = Hand(stages, credits=2, frames_per_link=3)
    hand.submit(1, 80)
    assert sent(hand) == [[(1, 0)], [(1, 8)]]
    hand.leave(1)
    assert hand.credits_out(1) == 1
    assert sent(hand) == [[(1, 16)]]
    hand.leave(2)
    hand.leave(3)
    assert hand.credits_out(1) == 2, "the second stage still has frame 1"
    assert sent(hand) == []
    hand.go(1, 1)
    assert hand.credits_out(1) == 1
    assert sent(hand) == [[(1, 24)]]
    hand.go(2, 1)
    assert hand.credits_out(1) == 1, "that of frame 3 has come back, that of frame 4 is out"
    hand.go(3, 1)
    assert hand.credits_out(1) == 1, "frame 4 is still with the first stage"
    hand.leave(4)
    assert hand.credits_out(1) == 0


def test_what_the_stages_behind_the_second_do_does_not_matter() -> None:
    hand = Hand(4, credits=1, frames_per_link=2)
    hand.submit(1, 80)
    sent(hand)
    hand.leave(1)
    assert sent(hand) == [[(1, 8)]]
    hand.leave(2)
    assert hand.credits_out(1) == 1
    hand.leave(1, 1)
    assert hand.credits_out(1) == 0
    assert sent(hand) == [[(1, 16)]]
    hand.leave(1, 2)
    hand.done(1)
    assert hand.credits_out(1) == 1


def test_with_one_stage_a_credit_returns_when_its_chunk_is_sent() -> None:
    hand = Hand(1, credits=1, frames_per_link=4)
    hand.submit(1, 40)
    assert sent(hand) == [[(1, 0)], [(1, 8)], [(1, 16)], [(1, 24)]], "only places bound the frames"
    assert hand.credits_out(1) == 0
    hand.run()
    counters = hand.history.counters
    assert (counters.credit_waits, counters.credits_max, counters.credit_drains) == (0, 1, 1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_in_lock_step_a_chunk_waits_for_the_end_of_the_one_before(stages: int) -> None:
    hand = Hand(stages, credits=0, frames_per_link=3)
    hand.submit(1, 20)
    for number, start in ((1, 0), (2, 8)):
        assert sent(hand) == [[(1, start)]]
        for stage in range(stages):
            assert sent(hand) == []
            hand.go(number, stage)
    assert sent(hand) == [[(1, 16)]]


def test_a_frame_without_chunks_is_waited_for_as_well() -> None:
    """The second stage takes frames in their order, whatever is in them."""
    hand = Hand(2, credits=1, frames_per_link=3, min_group_rows=1)
    hand.submit(1, 1, 50)
    hand.send()
    hand.pass_through()
    (decoding,) = hand.send()
    assert [type(step) for step in decoding.steps] == [DecodeStep]
    hand.submit(2, 80)
    assert sent(hand) == [[(2, 0)]]
    hand.leave(2)
    hand.leave(3)
    assert hand.credits_out(2) == 1, "the second stage is at the stream's frame"
    hand.done(2)
    assert hand.credits_out(2) == 0


def test_all_chunks_of_a_frame_get_their_credits_back_together() -> None:
    hand = Hand(2, credits=1, frames_per_link=2, chunk=4)
    hand.submit(1, 40)
    hand.submit(2, 40)
    assert sent(hand) == [[(1, 0), (2, 0)]]
    hand.leave(1)
    assert (hand.credits_out(1), hand.credits_out(2)) == (0, 0)
    assert sent(hand) == [[(1, 4), (2, 4)]]


def test_the_credits_of_a_cancelled_prompt_trouble_nobody() -> None:
    hand = Hand(2, credits=1, frames_per_link=2, chunk=4)
    hand.submit(1, 40)
    hand.submit(2, 40)
    sent(hand)
    hand.cancel(1)
    hand.leave(1)
    assert hand.credits_out(2) == 0
    (frame,) = hand.send()
    assert (frame.ended, chunks_in(frame)) == ((1,), [(2, 4)])
    hand.leave(2)
    hand.cancel(2)
    hand.done(1)
    hand.run()


@given(st.data())
def test_in_any_order_of_events_a_credit_is_out_until_the_second_stage_can_start(
    data: st.DataObject,
) -> None:
    draw = data.draw
    stages = draw(st.integers(1, 4))
    credits = draw(st.integers(1, 4))
    hand = Hand(
        stages,
        credits=credits,
        chunk=draw(st.integers(1, 9)),
        frames_per_link=draw(st.integers(1, 4)),
        min_group_rows=1,
        max_frame_rows=draw(st.integers(1, 20)),
    )
    for session in range(1, draw(st.integers(2, 4))):
        hand.submit(session, draw(st.integers(1, 40)), draw(st.integers(1, 5)))
    held: dict[int, list[int]] = {}
    for _ in range(draw(st.integers(1, 60))):
        for frame in hand.send():
            for session, _ in chunks_in(frame):
                held.setdefault(session, []).append(frame.number)
        # A frame is with the second stage once it has left the first and the one before has left the second.
        started = 0 if stages == 1 else min(hand.left_at[0], hand.left_at[1] + 1)
        for session, numbers in held.items():
            if session in hand.core._running:
                out = [] if stages == 1 else [number for number in numbers if number > started]
                assert hand.credits_out(session) == len(out) <= credits
        sources = [*hand.left_at[:-1], hand.core._number]
        at = [s for s in range(stages) if hand.left_at[s] < (hand.left_at[s - 1] if s else sources[-1])]
        if not at:
            break
        stage = draw(st.sampled_from(at))
        hand.go(hand.left_at[stage] + 1, stage)
    for number in sorted(hand.frames):
        for stage in range(stages):
            if hand.left_at[stage] < number:
                hand.go(number, stage)
    hand.run()


# Counters.


def counters_of(hand: Hand) -> dict[str, float]:
    names = ("prefill_chunks", "credit_waits", "credit_wait_ms", "credits_max", "credit_drains")
    return {name: getattr(hand.history.counters, name) for name in names}


def test_credits_are_counted_when_their_prompt_is_computed() -> None:
    hand = Hand(2, credits=2, frames_per_link=3)
    hand.submit(1, 33)
    assert sent(hand) == [[(1, 0)], [(1, 8)]]
    hand.now = 1.0
    assert sent(hand) == []
    hand.leave(1)
    hand.now = 3.0
    assert sent(hand) == [[(1, 16)]]
    hand.leave(2)
    hand.now = 3.5
    hand.done(1)
    hand.now = 3.75
    assert sent(hand) == [[(1, 24)]]
    assert hand.history.counters.prefill_chunks == 0
    hand.run()
    # The first wait began with the second frame at 0, the next one with the third at 3.
    waits = 1000.0 + 500.0
    assert counters_of(hand) == {
        "prefill_chunks": 4,
        "credit_waits": 2,
        "credit_wait_ms": pytest.approx(waits),
        "credits_max": 2,
        "credit_drains": 2,
    }


def test_counters_add_up_over_prompts_and_the_most_credits_stay_known() -> None:
    hand = Hand(2, credits=3, frames_per_link=4, max_sessions=1)
    for session, n_prompt in ((1, 33), (2, 17), (3, 9)):
        hand.submit(session, n_prompt)
    hand.run()
    assert counters_of(hand) == {
        "prefill_chunks": 4 + 2 + 1,
        "credit_waits": 1,
        "credit_wait_ms": 0.0,
        "credits_max": 3,
        "credit_drains": 3 + 2 + 1,
    }


def test_a_prompt_that_was_broken_off_counts_for_nothing() -> None:
    hand = Hand(2, credits=1)
    hand.submit(1, 33)
    hand.send()
    hand.send()
    hand.cancel(1)
    hand.run()
    counters = hand.history.counters
    assert counters == CoreCounters(requests=1, cancelled=1, frames=counters.frames)
