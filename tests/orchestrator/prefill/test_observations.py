"""Reply statistics of the prefill (spec 2.7, rows of 12.5) and the representative sample (3.5, 12.4)."""

from __future__ import annotations

import math
from copy import copy
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefill import ComputeSample, PrefillStats, ms_to_us, representative, us_to_ms

MIB = 1024 * 1024

EdgeSeen = tuple[int, int, int, int]
ComputeSeen = tuple[int, int, int]


def edges(*seen: EdgeSeen) -> PrefillStats:
    stats = PrefillStats()
    for observation in seen:
        stats.observe_edge(*observation)
    return stats


def computed(*seen: ComputeSeen) -> PrefillStats:
    stats = PrefillStats()
    for observation in seen:
        stats.observe_compute(*observation)
    return stats


def compute_part(stats: PrefillStats) -> tuple[int, int, int, int]:
    return (
        stats.compute_us_at_slowest_rate,
        stats.compute_stage_index,
        stats.compute_token_count_at_slowest_rate,
        stats.compute_observation_count,
    )


def test_edges_keep_each_maximum_and_the_slowest_edge() -> None:
    assert edges((2, 12_000, 3_000, MIB), (1, 4_000, 40_000, MIB // 2)) == PrefillStats(
        edge_write_us_max=12_000,
        edge_wait_us_max=40_000,
        edge_total_us_max=44_000,
        edge_stage_index=1,
        edge_activation_bytes_max=524_288,
        edge_observation_count=2,
    )


def test_of_equal_edges_the_first_stays_and_negative_times_are_none() -> None:
    assert edges((2, 10, 5, 100), (1, 5, 10, 200)) == PrefillStats(
        edge_write_us_max=10,
        edge_wait_us_max=10,
        edge_total_us_max=15,
        edge_stage_index=2,
        edge_activation_bytes_max=100,
        edge_observation_count=2,
    )
    assert edges((3, -7, -9, 50)) == PrefillStats(edge_observation_count=1)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([(2, 18_000, 128), (1, 42_000, 128), (3, 25_000, 64)], (42_000, 1, 128, 3)),
        ([(1, 48_000, 128), (1, 30_000, 9)], (48_000, 1, 128, 2)),
        ([(1, 30_000, 9), (1, 48_000, 128)], (48_000, 1, 128, 2)),
        ([(1, 500, 8), (2, 500, 8)], (500, 1, 8, 2)),
        ([(1, 500, 8), (2, 1, 9)], (1, 2, 9, 2)),
        ([(1, 0, 128)], (0, 0, 0, 1)),
        ([(1, -4, 128), (2, 3, 1)], (3, 2, 1, 2)),
        ([(4, 7, 0)], (7, 4, 1, 1)),
        ([(4, 7, -2)], (7, 4, 1, 1)),
    ],
)
def test_compute_keeps_the_larger_then_the_slower_sample(
    seen: list[ComputeSeen], expected: tuple[int, int, int, int]
) -> None:
    assert compute_part(computed(*seen)) == expected


def test_any_sample_beats_one_that_says_nothing_and_that_one_never_wins() -> None:
    nothing = PrefillStats(compute_us_at_slowest_rate=0, compute_token_count_at_slowest_rate=500)
    stats = copy(nothing)
    stats.merge(computed((2, 10, 1)))
    assert compute_part(stats) == (10, 2, 1, 1)
    stats.merge(nothing)
    assert compute_part(stats) == (10, 2, 1, 1)


def test_empty_means_that_nothing_was_observed() -> None:
    assert PrefillStats().empty
    assert not edges((1, 0, 0, 0)).empty
    assert not computed((1, 0, 1)).empty


small = st.integers(-3, 6)
stages = st.integers(1, 5)
observations = st.lists(
    st.tuples(st.just("edge"), st.tuples(stages, small, small, st.integers(0, 4)))
    | st.tuples(st.just("compute"), st.tuples(stages, small, small)),
    max_size=12,
)


@given(st.lists(observations, max_size=5))
def test_merging_portions_is_observing_all(portions: list[list[tuple[str, tuple[int, ...]]]]) -> None:
    def observed(seen: list[tuple[str, tuple[int, ...]]]) -> PrefillStats:
        stats = PrefillStats()
        for kind, values in seen:
            if kind == "edge":
                stats.observe_edge(*values)
            else:
                stats.observe_compute(*values)
        return stats

    def merged(one: PrefillStats, other: PrefillStats) -> PrefillStats:
        one.merge(other)
        return one

    everything = [observation for portion in portions for observation in portion]
    assert reduce(merged, map(observed, portions), PrefillStats()) == observed(everything)
    stats = observed(everything)
    seen_edges = [
        (max(w, 0), max(d, 0), s, b) for kind, v in everything if kind == "edge" for s, w, d, b in [v]
    ]
    assert stats.edge_write_us_max == max([w for w, _, _, _ in seen_edges], default=0)
    assert stats.edge_wait_us_max == max([d for _, d, _, _ in seen_edges], default=0)
    assert stats.edge_total_us_max == max([w + d for w, d, _, _ in seen_edges], default=0)
    seen = [(max(n, 1), us) for kind, v in everything if kind == "compute" for _, us, n in [v] if us > 0]
    slowest = (stats.compute_token_count_at_slowest_rate, stats.compute_us_at_slowest_rate)
    assert slowest == max(seen, default=(0, 0))
    assert stats.edge_observation_count + stats.compute_observation_count == len(everything)


@pytest.mark.parametrize(
    ("ms", "us"),
    [
        (1.0, 1000),
        (0.0004, 0),
        (0.0005, 1),
        (1.2345, 1235),
        (44.0, 44_000),
        (0.0, 0),
        (-3.0, 0),
        (math.nan, 0),
        (math.inf, 0),
        (-math.inf, 0),
        (1e308, 0),  # not finite in microseconds
    ],
)
def test_milliseconds_become_microseconds(ms: float, us: int) -> None:
    assert ms_to_us(ms) == us


@given(st.integers(0, 10**12))
def test_microseconds_survive_as_milliseconds(us: int) -> None:
    assert ms_to_us(us_to_ms(us)) == us


def test_the_representative_sample_is_the_largest_then_the_slowest() -> None:
    first, tail = ComputeSample(180.0, 128), ComputeSample(90.0, 384)
    assert representative(first, tail) == tail
    assert representative(tail, first) == tail
    assert representative(first, ComputeSample(181.0, 128)) == ComputeSample(181.0, 128)
    assert representative(first, ComputeSample(179.0, 128)) == first
    assert representative(ComputeSample(), ComputeSample(0.0, 1)) == ComputeSample(0.0, 1)
