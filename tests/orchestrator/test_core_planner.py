"""What stages report reaches the planners: of the prompt that runs, and by the transport pool of the next."""

from __future__ import annotations

import pytest
from skippy_orchestrator.deployment import PrefillSection
from skippy_orchestrator.frames import StageReport
from skippy_orchestrator.prefill import TransportEstimate
from skippy_stage.protocol import PrefillStep

from tests.orchestrator.by_hand import Hand

RAMP = PrefillSection(
    chunk_tokens=1, adaptive_start=8, adaptive_step=8, adaptive_max=32, adaptive_target_ms=10.0, credits=3
)


def report(rows: int, compute_us: int, write_us: int = 0, queue_us: int = 0, sent: int = 0) -> StageReport:
    call_us = compute_us + queue_us + write_us
    return StageReport(rows=rows, compute_us=compute_us, queue_us=queue_us, call_us=call_us, sent_bytes=sent)


def estimate_of(hand: Hand) -> TransportEstimate:
    estimate = hand.core._prefill.transport.estimate()
    assert estimate == hand.history.transport.estimate()
    assert estimate is not None
    return estimate


def sizes(hand: Hand, session: int, n_prompt: int, *rates_us: int, write_us: int = 0) -> list[int]:
    """Rows of the chunks of a prompt, where each stage takes so many microseconds for a row."""
    hand.submit(session, n_prompt)
    rows: list[int] = []
    while not rows or hand.frames or not hand.core.idle:
        hand.send()
        frame = hand.frames[min(hand.frames)]
        chunk = sum(step.rows for step in frame.steps if isinstance(step, PrefillStep))
        rows += [chunk] * bool(chunk)
        hand.pass_through(*(report(chunk, chunk * rate, write_us=write_us) for rate in rates_us))
    return rows


def test_a_prefill_tells_the_pool_what_every_stage_took() -> None:
    hand = Hand(3, chunk=16)
    hand.submit(1, 17)
    hand.send()
    hand.leave(1, 0, report(17, 1700, write_us=300))
    hand.leave(1, 1, report(17, 3400, write_us=500, queue_us=40, sent=17 * 16))
    assert hand.history.transport.estimate() is None, "it is told at the end"
    hand.done(1, report(17, 850, write_us=90, queue_us=10, sent=17 * 16))
    assert estimate_of(hand) == TransportEstimate(
        write_ms=0.5,
        wait_ms=0.04,
        slowest_compute_ms=3.4,
        slowest_compute_ms_per_token=pytest.approx(0.2),
        write_to_compute=pytest.approx(0.5 / 3.4),
        wait_to_compute=pytest.approx(0.04 / 3.4),
        edge_stage=1,
        bottleneck_stage=1,
        bottleneck_tokens=17,
        activation_bytes=17 * 16,
        observations=2,
    )


@pytest.mark.parametrize("slowest", [0, 1, 2])
def test_the_slowest_stage_is_the_bottleneck(slowest: int) -> None:
    hand = Hand(3, chunk=16)
    hand.submit(1, 40)
    while hand.send() or hand.frames:
        frame = hand.frames[min(hand.frames)]
        rows = sum(step.rows for step in frame.steps if isinstance(step, PrefillStep))
        hand.pass_through(*(report(rows, rows * (700 if stage == slowest else 300)) for stage in range(3)))
    estimate = estimate_of(hand)
    assert estimate.bottleneck_stage == slowest
    assert estimate.slowest_compute_ms_per_token == pytest.approx(0.7)
    assert estimate.bottleneck_tokens == 16


def test_the_wait_for_credits_and_the_drain_are_in_the_estimate() -> None:
    hand = Hand(2, chunk=8, credits=1)
    hand.submit(1, 17)
    hand.send()
    assert hand.send() == []
    hand.now = 0.25
    hand.leave(1, 0, report(8, 100))
    hand.send()
    hand.now = 0.375
    hand.done(1, report(8, 100))
    hand.leave(2, 0, report(9, 100))
    hand.done(2, report(9, 100))
    assert estimate_of(hand).wait_ms == pytest.approx(250.0)
    hand.run()
    hand.submit(2, 9)
    hand.send()
    hand.now = 0.875
    number = max(hand.frames)
    hand.leave(number, 0, report(9, 100))
    hand.done(number, report(9, 100))
    # No wait this time, and a drain of 500 ms; the second prefill counts a quarter.
    assert estimate_of(hand).wait_ms == pytest.approx(0.75 * 250.0 + 0.25 * 500.0)


def test_prompts_that_share_a_frame_share_its_time_by_rows() -> None:
    hand = Hand(2, chunk=32)
    hand.submit(1, 12)
    hand.submit(2, 4)
    (frame,) = hand.send()
    assert [step.rows for step in frame.steps if isinstance(step, PrefillStep)] == [12, 4]
    hand.leave(1, 0, report(16, 1600))
    machines = [hand.core._running[session].prefill for session in (1, 2)]
    assert [machine and machine.stats.compute_ms for machine in machines] == [1.2, 0.4]


def test_decode_rows_in_a_frame_take_their_share_too() -> None:
    hand = Hand(2, chunk=32)
    hand.submit(1, 1, 9)
    hand.send()
    hand.pass_through()
    hand.submit(2, 30)
    (frame,) = hand.send()
    hand.leave(frame.number, 0, report(31, 3100))
    hand.done(frame.number, report(31, 9300))
    assert estimate_of(hand).slowest_compute_ms_per_token == pytest.approx(0.3)


def test_a_prompt_that_was_broken_off_or_has_one_token_teaches_nothing() -> None:
    hand = Hand(2, chunk=8)
    hand.submit(1, 40)
    hand.send()
    hand.leave(1, 0, report(8, 100))
    hand.cancel(1)
    hand.run()
    hand.submit(2, 1, 3)
    hand.run()
    assert hand.history.transport.estimate() is None


def test_the_next_prompt_starts_from_what_the_last_one_taught() -> None:
    """While computing hides all else chunks grow; what the slowest stage does in 10 ms is the ceiling."""
    quick = Hand(2, prefill=RAMP)
    assert sizes(quick, 1, 200, 100, 100) == [8, 8, 16, 24, 32, 32, 32, 32, 16]
    # One step of growth is known beforehand. The second chunk left before the first one was reported on.
    assert sizes(quick, 2, 200, 100, 100) == [16, 16, 24, 32, 32, 32, 32, 16]
    slow = Hand(2, prefill=RAMP)
    assert sizes(slow, 1, 200, 100, 1000) == [8, 8, 16, 24, 32, 32, 32, 32, 16]
    # The second stage does 10 rows in 10 ms: one step above 8 is too much.
    assert sizes(slow, 2, 200, 100, 1000) == [8] * 25


def test_a_write_that_shows_keeps_chunks_small() -> None:
    hand = Hand(2, prefill=RAMP)
    rows = sizes(hand, 1, 200, 100, 100, write_us=4000)
    assert max(rows[:-1]) == 8
    assert sizes(hand, 2, 200, 100, 100, write_us=4000)[0] == 8


def test_what_was_learned_outlives_a_pipeline() -> None:
    hand = Hand(2, prefill=RAMP)
    sizes(hand, 1, 200, 100, 100)
    again = Hand(2, prefill=RAMP, history=hand.history)
    again.submit(1, 200)
    frame = again.send()[0]
    assert [step.rows for step in frame.steps if isinstance(step, PrefillStep)] == [16]
    assert hand.history.counters.requests == 2
