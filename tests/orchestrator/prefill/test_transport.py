"""The transport pool (spec 3.5, rows of 12.4), and planners that start from it (end of 3.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefill import (
    ComputeSample,
    PrefillPolicy,
    PrefillReport,
    PrefillStats,
    TransportEstimate,
    TransportPool,
    TransportSeed,
    ms_to_us,
)

from tests.orchestrator.prefill.reference import Prefilled, smoothed

MIB = 1024 * 1024


def report(
    compute_ms: float,
    tokens: int,
    write_ms: float = 0.0,
    wait_ms: float = 0.0,
    replies: PrefillStats | None = None,
) -> PrefillReport:
    return PrefillReport(ComputeSample(compute_ms, tokens), write_ms, wait_ms, replies or PrefillStats())


def first_chunk_of_512(pool: TransportPool) -> int:
    planner = PrefillPolicy().planner()
    pool.prepare(planner)
    return planner.chunk_size(0, 512)


def test_an_empty_pool_knows_nothing_and_prepares_nothing() -> None:
    pool = TransportPool()
    assert pool.estimate() is None
    assert pool.seed() is None
    assert first_chunk_of_512(pool) == 128


def test_a_hidden_transport_makes_the_first_chunk_larger() -> None:
    replies = PrefillStats()
    replies.observe_edge(1, 1000, 0, MIB)
    pool = TransportPool()
    pool.observe(report(10.0, 1, replies=replies))
    assert pool.seed() == TransportSeed(1.0, 0.1, 0.0)
    planner = PrefillPolicy().planner()
    seed = pool.seed()
    assert seed is not None
    planner.observe(*seed)
    assert planner.chunk_size(0, 512) == 256
    # Prepared in full it is held down by the rate: 10 ms a token.
    assert first_chunk_of_512(pool) == 128


@pytest.mark.parametrize(
    ("write_ms", "wait_ms", "size"), [(2.0, 5.0, 256), (5.0, 0.0, 128), (0.0, 99.0, 128)]
)
def test_the_first_chunk_is_a_step_larger_or_the_start(write_ms: float, wait_ms: float, size: int) -> None:
    pool = TransportPool()
    pool.observe(report(10.0, 100, write_ms, wait_ms))
    assert first_chunk_of_512(pool) == size


def test_the_slowest_stage_sets_the_rate() -> None:
    replies = PrefillStats()
    replies.observe_compute(2, 50_000, 64)
    pool = TransportPool()
    pool.observe(report(80.0, 256, write_ms=20.0, replies=replies))
    assert pool.estimate() == TransportEstimate(
        write_ms=20.0,
        wait_ms=0.0,
        slowest_compute_ms=50.0,
        slowest_compute_ms_per_token=0.78125,
        write_to_compute=0.4,
        wait_to_compute=0.0,
        edge_stage=0,
        bottleneck_stage=2,
        bottleneck_tokens=64,
        activation_bytes=0,
        observations=1,
    )
    assert first_chunk_of_512(pool) == 128


def test_stage_0_stays_the_bottleneck_when_no_other_is_slower() -> None:
    replies = PrefillStats()
    replies.observe_compute(2, 80_000, 256)
    pool = TransportPool()
    pool.observe(report(80.0, 256, replies=replies))
    estimate = pool.estimate()
    assert estimate is not None
    assert (estimate.bottleneck_stage, estimate.bottleneck_tokens) == (0, 256)


def test_the_slowest_edge_is_named() -> None:
    replies = PrefillStats()
    replies.observe_edge(2, 6_000, 1_000, MIB)
    replies.observe_edge(1, 2_000, 3_000, 7)
    pool = TransportPool()
    pool.observe(report(10.0, 10, 4.0, 2.0, replies))
    estimate = pool.estimate()
    assert estimate is not None
    assert (estimate.write_ms, estimate.wait_ms) == (6.0, 3.0)
    assert (estimate.edge_stage, estimate.activation_bytes, estimate.observations) == (2, MIB, 2)
    pool.observe(report(10.0, 10, 4.0, 3.0, replies))  # 7 ms are not more than 7
    estimate = pool.estimate()
    assert estimate is not None
    assert (estimate.edge_stage, estimate.observations) == (0, 4)


def test_a_prefill_of_nothing_teaches_nothing() -> None:
    replies = PrefillStats()
    replies.observe_compute(1, 50_000, 64)
    pool = TransportPool()
    pool.observe(report(5.0, 0, 20.0, 20.0, replies))
    assert pool.estimate() is None
    pool.observe(report(10.0, 10))
    known = pool.estimate()
    pool.observe(report(5.0, 0, 20.0, 20.0, replies))
    assert pool.estimate() == known


def test_later_prefills_count_a_quarter() -> None:
    pool = TransportPool()
    pool.observe(report(100.0, 100, 10.0, 0.0))
    pool.observe(report(200.0, 100, 20.0, 40.0))
    estimate = pool.estimate()
    assert estimate is not None
    assert (estimate.write_ms, estimate.wait_ms) == (12.5, 10.0)
    assert (estimate.slowest_compute_ms, estimate.slowest_compute_ms_per_token) == (125.0, 1.25)
    assert estimate.write_to_compute == pytest.approx(0.1)
    assert estimate.wait_to_compute == pytest.approx(0.05)
    assert estimate.observations == 2


def test_no_compute_time_counts_as_a_microsecond() -> None:
    pool = TransportPool()
    pool.observe(report(0.0, 2, 1.0))
    estimate = pool.estimate()
    assert estimate is not None
    assert estimate.slowest_compute_ms == 0.001
    assert estimate.write_to_compute == pytest.approx(1000.0)


class Listening:
    """A planner that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[float, ...]] = []

    def chunk_size(self, index: int, total: int) -> int:
        return 1

    def observe(self, compute_ms: float, write_ms: float, wait_ms: float) -> None:
        self.told.append((compute_ms, write_ms, wait_ms))

    def calibrate(self, ms_per_token: float) -> None:
        self.told.append((ms_per_token,))


def test_a_planner_hears_the_rate_first_and_then_the_seed_once() -> None:
    pool, planner = TransportPool(), Listening()
    pool.prepare(planner)
    assert planner.told == []
    pool.observe(report(100.0, 50, 10.0, 20.0))
    pool.prepare(planner)
    assert planner.told == [(2.0,), (1.0, 0.1, 0.2)]


milliseconds = st.integers(0, 500_000).map(lambda us: us / 1000)
prefills = st.builds(
    Prefilled,
    compute=milliseconds,
    tokens=st.integers(0, 400),
    write=milliseconds,
    wait=milliseconds,
    later_stage=st.integers(1, 7),
    later_compute=milliseconds.filter(bool),
    later_tokens=st.integers(0, 400),
    later_write=milliseconds,
    later_wait=milliseconds,
)


@given(st.lists(prefills, max_size=8))
def test_the_pool_is_the_reference(told: list[Prefilled]) -> None:
    pool = TransportPool()
    for prefill in told:
        replies = PrefillStats()
        if prefill.later_tokens:
            replies.observe_compute(
                prefill.later_stage, ms_to_us(prefill.later_compute), prefill.later_tokens
            )
        replies.observe_edge(
            prefill.later_stage, ms_to_us(prefill.later_write), ms_to_us(prefill.later_wait), 1
        )
        pool.observe(report(prefill.compute, prefill.tokens, prefill.write, prefill.wait, replies))
    counted = [prefill for prefill in told if prefill.tokens]
    estimate = pool.estimate()
    assert (estimate is not None) == bool(counted)
    if estimate is not None:
        for key, value in smoothed(told).items():
            assert getattr(estimate, key) == pytest.approx(value), key
        assert (estimate.bottleneck_tokens, estimate.bottleneck_stage) == counted[-1].slowest[1:]
        assert estimate.observations == len(counted)
