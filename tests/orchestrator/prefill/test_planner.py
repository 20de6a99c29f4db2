"""Chunk sizes: the policies of spec 3.2, the rows of 12.3, and the adaptive planner against a reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from skippy_orchestrator.deployment import PrefillSection
from skippy_orchestrator.prefill import AdaptivePlanner, PrefillPolicy, parse_schedule

from tests.orchestrator.prefill.reference import Calibrate, Observe, Ramp, chunk_size, planned

LONG = 100_000


def sizes(policy: PrefillPolicy, count: int = 4) -> list[int]:
    planner = policy.planner()
    return [planner.chunk_size(index, LONG) for index in range(count)]


def adaptive(**values: Any) -> AdaptivePlanner:
    planner = PrefillPolicy(**values).planner()
    assert isinstance(planner, AdaptivePlanner)
    return planner


def at_256() -> AdaptivePlanner:
    planner = adaptive()
    planner.observe(100, 5, 10)
    assert planner.next_size == 256
    return planner


# Policies and their texts.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128, 256,512", (128, 256, 512)),
        ("7", (7,)),
        (" 1 ,\t2 ", (1, 2)),
        ("007", (7,)),
        ("", ()),
        ("   ", ()),
    ],
)
def test_a_schedule_is_a_list_of_sizes(text: str, expected: tuple[int, ...]) -> None:
    assert parse_schedule(text) == expected


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("128,0", "0"),
        ("128,,256", ""),
        ("abc", "abc"),
        (",", ""),
        ("128,", ""),
        ("-1", "-1"),
        ("+1", "+1"),
        ("1.5", "1.5"),
        ("1_000", "1_000"),
        ("٣", "٣"),
        ("1 2", "1 2"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_a_schedule_with_a_bad_item_is_refused_by_name(text: str, item: str) -> None:
    with pytest.raises(ValueError, match=r"^schedule: got .* whole numbers of at least 1") as error:
        parse_schedule(text)
    assert f"got {item!r} in {text!r}" in str(error.value)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=20))
def test_a_schedule_and_its_label_say_the_same(wanted: list[int]) -> None:
    policy = PrefillPolicy(policy="schedule", schedule=" , ".join(map(str, wanted)))
    assert policy.label == ",".join(map(str, wanted))
    assert parse_schedule(policy.label) == policy.sizes == tuple(wanted)
    assert sizes(policy, len(wanted) + 3) == [*wanted, *[wanted[-1]] * 3]


def test_fixed_and_schedule() -> None:
    assert sizes(PrefillPolicy(policy="fixed")) == [256] * 4
    assert sizes(PrefillPolicy(policy="fixed", chunk_tokens=100)) == [100] * 4
    assert sizes(PrefillPolicy(policy="schedule", schedule="128, 256,512")) == [128, 256, 512, 512]
    assert sizes(PrefillPolicy(policy="fixed", schedule="128,256,384")) == [128, 256, 384, 384]


@pytest.mark.parametrize(
    ("policy", "schedule", "name", "label"),
    [
        (" Fixed\n", "", "fixed", ""),
        ("FIXED", " 1, 2", "schedule", "1,2"),
        ("Schedule", "3", "schedule", "3"),
        ("adaptive", "", "adaptive-ramp", ""),
        (" Adaptive-Ramp ", "5,6", "adaptive-ramp", ""),
    ],
)
def test_names_and_labels(policy: str, schedule: str, name: str, label: str) -> None:
    made = PrefillPolicy(policy=policy, schedule=schedule)
    assert (made.name, made.label) == (name, label)


def test_the_defaults_are_those_of_the_spec() -> None:
    policy = PrefillPolicy()
    assert policy == PrefillPolicy("adaptive-ramp", "", 256, 128, 128, 384, 100.0)
    assert policy.name == "adaptive-ramp"


def test_a_deployment_says_the_same() -> None:
    assert PrefillPolicy.of(PrefillSection()) == PrefillPolicy()
    section = PrefillSection(
        policy="fixed",
        schedule="1,2",
        chunk_tokens=3,
        adaptive_start=4,
        adaptive_step=5,
        adaptive_max=6,
        adaptive_target_ms=7.0,
    )
    assert PrefillPolicy.of(section) == PrefillPolicy("fixed", "1,2", 3, 4, 5, 6, 7.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": "fast"}, "policy: got 'fast', expected fixed, schedule or adaptive-ramp"),
        ({"policy": ""}, "policy: got '', expected fixed, schedule or adaptive-ramp"),
        ({"policy": "schedule"}, "schedule: got '', expected at least 1 size"),
        ({"policy": "schedule", "schedule": "  "}, "schedule: got '  ', expected at least 1 size"),
        ({"policy": "schedule", "schedule": "1,x"}, "schedule: got 'x' in '1,x', expected whole numbers"),
        ({"policy": "adaptive", "schedule": "0"}, "schedule: got '0' in '0', expected whole numbers"),
        *[
            (
                {"policy": policy, "schedule": "1", "chunk_tokens": 0},
                "chunk_tokens: got 0, expected at least 1",
            )
            for policy in ("fixed", "schedule", "adaptive")
        ],
        ({"adaptive_start": 0}, "adaptive_start: got 0, expected at least 1"),
        ({"adaptive_step": -3}, "adaptive_step: got -3, expected at least 1"),
        ({"adaptive_max": 0}, "adaptive_max: got 0, expected at least 1"),
        ({"adaptive_start": 385}, "adaptive_start: got 385, expected at most adaptive_max, 384"),
        *[
            (
                {"adaptive_target_ms": target},
                f"adaptive_target_ms: got {target}, expected a finite number above 0",
            )
            for target in (0.0, -1.0, math.nan, math.inf)
        ],
    ],
)
def test_what_is_wrong_is_refused_with_field_value_and_limit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        PrefillPolicy(**values)


def test_adaptive_values_matter_to_the_adaptive_policy_alone() -> None:
    assert sizes(PrefillPolicy(policy="fixed", adaptive_start=500, adaptive_target_ms=0.0)) == [256] * 4


def test_fixed_and_schedule_learn_nothing() -> None:
    for policy in (PrefillPolicy(policy="fixed"), PrefillPolicy(policy="schedule", schedule="1,2,3")):
        planner, before = policy.planner(), sizes(policy)
        for _ in range(5):
            planner.observe(100, 0, 0)
            planner.observe(100, 1000, 1000)
            planner.calibrate(50.0)
        assert [planner.chunk_size(index, LONG) for index in range(4)] == before


def test_planners_of_one_policy_are_independent() -> None:
    policy = PrefillPolicy()
    one, other = policy.planner(), policy.planner()
    one.observe(100, 5, 20)
    assert (one.chunk_size(1, 512), other.chunk_size(1, 512)) == (256, 128)


# The adaptive ramp, row by row (spec 12.3).


@pytest.mark.parametrize(("total", "size"), [(512, 128), (256, 256), (257, 128), (1, 256), (0, 256)])
def test_a_prompt_that_fits_goes_in_one_chunk(total: int, size: int) -> None:
    planner = adaptive()
    assert planner.chunk_size(0, total) == size
    assert planner.chunk_size(1, total) == 128


def test_hidden_transport_grows_chunks_to_the_maximum() -> None:
    planner = adaptive()
    grown = []
    for _ in range(100):
        planner.observe(100, 5, 20)
        grown.append(planner.chunk_size(1, LONG))
    assert grown == [256] + [384] * 99


@pytest.mark.parametrize(
    ("write", "wait", "size"),
    [
        (5, 150, 128),
        (90, 0, 128),
        (30, 0, 256),
        (5, 100, 256),
        # At the thresholds.
        (25, 75, 384),
        (25.1, 75, 256),
        (25, 75.1, 256),
        (75, 125, 256),
        (75.1, 0, 128),
        (0, 125.1, 128),
    ],
)
def test_what_shows_shrinks_chunks_and_what_is_between_leaves_them(
    write: float, wait: float, size: int
) -> None:
    planner = at_256()
    planner.observe(100, write, wait)
    assert planner.chunk_size(1, LONG) == size


def test_chunks_never_shrink_below_the_start() -> None:
    planner = adaptive()
    planner.observe(100, 90, 0)
    assert planner.next_size == 128


def test_no_compute_time_counts_as_a_microsecond() -> None:
    planner = at_256()
    planner.observe(0, 0.0002, 0.0007)
    assert planner.next_size == 384
    planner.observe(-5, 0.0008, 0)
    assert planner.next_size == 256


@pytest.mark.parametrize(
    ("rate", "ceiling"),
    [
        *[(rate, 384) for rate in (0.2, 0.25, 0.26)],
        (0.39, 256),
        *[(rate, 128) for rate in (0.4, 0.5, 0.78125, 1.0, 5.0)],
        *[(rate, 384) for rate in (math.nan, 0.0, -1.0, math.inf)],
        (1e300, 128),
        (5e-324, 128),  # 100 ms over it is infinite
        (1e-300, 384),
    ],
)
def test_calibrating_sets_the_ceiling(rate: float, ceiling: int) -> None:
    planner = adaptive()
    for _ in range(3):
        planner.observe(100, 5, 20)
    planner.calibrate(rate)
    assert planner.ceiling == ceiling
    assert planner.chunk_size(1, LONG) == ceiling
    planner.observe(100, 5, 20)
    assert planner.chunk_size(1, LONG) == ceiling


def test_a_later_calibration_can_lift_the_ceiling() -> None:
    planner = adaptive()
    planner.calibrate(1.0)
    planner.calibrate(0.2)
    planner.observe(100, 5, 20)
    assert (planner.ceiling, planner.next_size) == (384, 256)


# Against the reference.

ramps = st.builds(
    lambda fixed, start, step, more, target: Ramp(fixed, start, step, start + more, target),
    st.integers(1, 600),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(0, 900),
    st.floats(0.001, 1e4),
)
any_float = st.floats(allow_nan=True, allow_infinity=True)
times = st.floats(0, 300) | st.sampled_from([25.0, 75.0, 100.0, 125.0]) | any_float
rates = st.floats(1e-4, 50) | any_float
histories = st.lists(st.builds(Observe, times, times, times) | st.builds(Calibrate, rates), max_size=40)


@given(ramps, histories, st.integers(0, 1200), st.integers(0, 3))
@example(Ramp(256, 128, 128, 384, 100.0), [Calibrate(0.78125), Observe(1.0, 0.4, 0.0)], 512, 0)
def test_the_adaptive_planner_is_the_reference_and_stays_within_its_limits(
    ramp: Ramp, history: list[Observe | Calibrate], total: int, index: int
) -> None:
    planner = adaptive(
        chunk_tokens=ramp.fixed,
        adaptive_start=ramp.start,
        adaptive_step=ramp.step,
        adaptive_max=ramp.most,
        adaptive_target_ms=ramp.target,
    )
    for count, event in enumerate(history, 1):
        if isinstance(event, Calibrate):
            planner.calibrate(event.rate)
        else:
            planner.observe(event.compute, event.write, event.wait)
        size, ceiling = planned(ramp, history[:count])
        assert planner.next_size == size
        assert planner.ceiling == (ramp.most if ceiling is None else ceiling)
        assert ramp.start <= planner.next_size <= planner.ceiling <= ramp.most
    assert planner.chunk_size(index, total) == chunk_size(ramp, history, index, total)
    assert planner.chunk_size(index, total) == planner.chunk_size(index, total)
