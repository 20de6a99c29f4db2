"""Credits, waits and observations of the prefill machine, case by case."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from skippy_orchestrator.prefill import (
    Chunk,
    ComputeSample,
    PrefillMachine,
    PrefillPolicy,
    PrefillReport,
    PrefillStats,
    PrefillSummary,
    ScheduledPlanner,
    TransportPool,
)

from tests.orchestrator.prefill.drive import chunks_of, dispatch, finish, machine

# Credits and waits.


def test_at_most_so_many_chunks_hold_a_credit() -> None:
    prefill = machine(30, credits=2)
    dispatch(prefill)
    dispatch(prefill)
    assert prefill.next_chunk(9, 0.0) is None
    prefill.left_first_stage(4, 1.0, 0.0)
    assert prefill.next_chunk(9, 0.0) is None  # it has not reached the second stage
    prefill.credit_returned(0.0)
    assert prefill.next_chunk(9, 0.0) == Chunk(8, 12, sample=False)
    assert (prefill.pending, prefill.stats.pending_max) == (1, 2)


def test_with_one_stage_a_credit_returns_at_once() -> None:
    prefill = machine(13, credits=1)
    for _ in range(3):
        dispatch(prefill, now=1.0)
        prefill.credit_returned(1.0)
    assert prefill.planned
    assert not prefill.done
    assert (prefill.stats.credit_waits, prefill.stats.pending_max) == (0, 1)
    assert (prefill.stats.drains, prefill.stats.drain_wait_ms) == (1, 0.0)


def test_lock_step_waits_for_the_end_of_the_pipeline() -> None:
    prefill = machine(30, credits=0)
    dispatch(prefill, now=1.0)
    prefill.left_first_stage(4, 1.0, 0.0)
    prefill.credit_returned(1.1)
    assert prefill.next_chunk(9, 1.25) is None
    prefill.credit_returned(1.375)  # credits do not matter: the wait goes on
    prefill.completed()
    assert dispatch(prefill, now=1.5) == Chunk(4, 8, sample=False)
    assert asdict(prefill.stats) == asdict(PrefillSummary()) | {
        "chunks": 2,
        "min_chunk_rows": 4,
        "max_chunk_rows": 4,
        "compute_ms": 1.0,
        "credit_waits": 1,
        "credit_wait_ms": 250.0,
        "credit_wait_ms_max": 250.0,
    }


def test_lock_step_drains_nothing() -> None:
    prefill = machine(9, credits=0)
    chunks_of(prefill)
    assert (prefill.stats.pending_max, prefill.stats.drains, prefill.stats.drain_wait_ms) == (0, 0, 0.0)


def test_a_wait_runs_from_the_first_refusal_to_the_return_of_the_credit_and_counts_once() -> None:
    prefill = machine(30, credits=1)
    dispatch(prefill, now=10.0)
    for now in (10.5, 10.625, 10.75):
        assert prefill.next_chunk(9, now) is None
    assert prefill.stats.credit_waits == 1
    prefill.credit_returned(10.875)
    assert prefill.next_chunk(9, 11.0) is not None
    assert prefill.stats.credit_wait_ms == 0.0, "the wait is over, but it counts with its chunk"
    dispatch(prefill, now=11.5)  # what it waited for meanwhile was room in a frame
    assert prefill.stats.credit_wait_ms == prefill.stats.credit_wait_ms_max == 375.0
    assert prefill.next_chunk(9, 12.0) is None
    prefill.credit_returned(12.25)
    dispatch(prefill, now=12.5)
    stats = prefill.stats
    assert (stats.credit_waits, stats.credit_wait_ms, stats.credit_wait_ms_max) == (2, 625.0, 375.0)


def test_a_second_return_does_not_lengthen_a_wait_and_the_next_chunk_has_none() -> None:
    prefill = machine(30, credits=2)
    dispatch(prefill, now=1.0)
    dispatch(prefill, now=1.0)
    assert prefill.next_chunk(9, 1.0) is None
    prefill.credit_returned(1.25)
    prefill.credit_returned(1.75)
    dispatch(prefill, now=2.0)
    dispatch(prefill, now=3.0)
    stats = prefill.stats
    assert (stats.credit_waits, stats.credit_wait_ms, stats.credit_wait_ms_max) == (1, 250.0, 250.0)


def test_only_a_missing_credit_is_a_wait() -> None:
    prefill = machine(9, credits=1)
    assert prefill.next_chunk(0, 1.0) is None  # no room
    dispatch(prefill, now=2.0)
    assert prefill.next_chunk(0, 3.0) is None  # neither room nor credit
    prefill.credit_returned(4.0)
    dispatch(prefill, now=5.0)
    assert prefill.next_chunk(9, 6.0) is None  # nothing left
    assert (prefill.stats.credit_waits, prefill.stats.credit_wait_ms) == (0, 0.0)
    prefill.check_integrity()


def test_asking_changes_nothing() -> None:
    prefill = machine(30)
    before = asdict(prefill.stats)
    assert prefill.next_chunk(9, 0.0) == prefill.next_chunk(9, 1.0) == Chunk(0, 4, sample=False)
    assert prefill.next_chunk(3, 2.0) == Chunk(0, 3, sample=False)
    assert asdict(prefill.stats) == before


def test_the_final_drain_counts_every_credit_that_is_out() -> None:
    prefill = machine(9, credits=3)
    dispatch(prefill, now=0.0)
    dispatch(prefill, now=1.0)
    assert prefill.planned
    prefill.credit_returned(1.012)
    prefill.credit_returned(1.099)
    stats = prefill.stats
    assert stats.drains == 2
    assert stats.drain_wait_ms == pytest.approx(99.0)
    assert stats.drain_wait_ms_max == pytest.approx(87.0)
    assert prefill.report().wait_ms_max == pytest.approx(87.0)
    assert stats.credit_waits == 0


def test_the_counters_know_the_smallest_and_the_largest_chunk() -> None:
    prefill = PrefillMachine(30, ScheduledPlanner((7, 2, 9)), credits=9)
    while not prefill.planned:
        dispatch(prefill)
    assert (prefill.stats.chunks, prefill.stats.min_chunk_rows, prefill.stats.max_chunk_rows) == (5, 2, 9)


# Observations.


def test_the_planner_hears_of_each_chunk_with_the_wait_of_that_chunk() -> None:
    class Listening(ScheduledPlanner):
        def __init__(self) -> None:
            super().__init__((4,))
            self.told: list[tuple[float, float, float]] = []

        def observe(self, compute_ms: float, write_ms: float, wait_ms: float) -> None:
            self.told.append((compute_ms, write_ms, wait_ms))

    planner = Listening()
    prefill = PrefillMachine(13, planner, credits=1)
    dispatch(prefill, now=0.0)
    assert prefill.next_chunk(9, 0.0) is None
    prefill.credit_returned(0.25)
    dispatch(prefill, now=0.375)
    prefill.left_first_stage(4, 10.0, 1.0)
    prefill.credit_returned(0.375)
    dispatch(prefill, now=0.5)
    prefill.left_first_stage(4, 20.0, 3.0)
    prefill.left_first_stage(5, 30.0, 2.0)
    assert planner.told == [(10.0, 1.0, 0.0), (20.0, 3.0, 250.0), (30.0, 2.0, 0.0)]
    stats = prefill.stats
    assert (stats.compute_ms, stats.write_ms, stats.write_ms_max) == (60.0, 6.0, 3.0)
    assert prefill.report() == PrefillReport(ComputeSample(30.0, 5), 3.0, 250.0, PrefillStats())


def test_other_stages_reports_are_collected() -> None:
    prefill = machine(9, credits=2)
    prefill.observed_at_stage(1, 4, 500, 20, 3, 4096)
    prefill.observed_at_stage(2, 4, 700, 10, 30, 2048)
    assert prefill.report().replies == PrefillStats(
        edge_write_us_max=20,
        edge_wait_us_max=30,
        edge_total_us_max=40,
        edge_stage_index=2,
        edge_activation_bytes_max=2048,
        edge_observation_count=2,
        compute_us_at_slowest_rate=700,
        compute_token_count_at_slowest_rate=4,
        compute_stage_index=2,
        compute_observation_count=2,
    )


@pytest.mark.parametrize(("n_prompt", "start"), [(1, 0), (9, 8)])
def test_a_chunk_of_the_last_token_alone_teaches_the_pool_nothing(n_prompt: int, start: int) -> None:
    prefill = machine(n_prompt, start=start)
    finish(prefill, dispatch(prefill))
    prefill.observed_at_stage(1, 1, 500, 20, 3, 4096)
    pool = TransportPool()
    pool.observe(prefill.report())
    assert prefill.done
    assert pool.estimate() is None


def test_a_prefill_teaches_the_next_one() -> None:
    pool = TransportPool()
    policy = PrefillPolicy()
    first = PrefillMachine(1000, policy.planner(), credits=3)
    while not first.planned:
        chunk = dispatch(first)
        first.left_first_stage(chunk.rows, chunk.rows * 0.2, 0.0)
        first.credit_returned(0.0)
        first.observed_at_stage(1, chunk.rows, chunk.rows * 300, 0, 0, chunk.rows * 2304)
        first.completed()
    assert first.stats.max_chunk_rows == 384
    assert first.finish(pool) is first.stats
    estimate = pool.estimate()
    assert estimate is not None
    assert estimate.bottleneck_stage == 1
    assert estimate.slowest_compute_ms_per_token == pytest.approx(0.3)
    planner = policy.planner()
    pool.prepare(planner)
    second = PrefillMachine(1000, planner, credits=3)
    assert dispatch(second).rows == 256  # grown by the seed, held at 100 ms by the rate


def test_a_second_stage_that_lags_makes_chunks_small_again() -> None:
    """Stage 0 computes 1 ms for 100 tokens, the second stage starts as slowly as ``lag`` says."""
    planner = PrefillPolicy().planner()
    prefill = PrefillMachine(10_000, planner, credits=1)
    now, rows = 0.0, []
    for lag in [0.0] * 4 + [20.0] * 4 + [0.0] * 3:
        chunk = dispatch(prefill, now)
        rows.append(chunk.rows)
        prefill.left_first_stage(chunk.rows, chunk.rows / 100, 0.0)
        assert prefill.next_chunk(1000, now) is None
        now += lag / 1000
        prefill.credit_returned(now)
        prefill.completed()
    assert rows == [128, 256, 384, 384, 384, 384, 256, 128, 128, 128, 256]
