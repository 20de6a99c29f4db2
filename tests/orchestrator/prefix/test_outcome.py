"""Which way of spec 4.5 is taken, with an oracle that tries all of them, and what is reported."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.deployment import PrefixCacheSection
from skippy_orchestrator.prefix.outcome import (
    MISS,
    CacheStats,
    CacheStatus,
    HitKind,
    Lookup,
    RestorePlan,
    choose_restore,
    lookup_bypass,
    savings,
    stats_of,
)
from skippy_stage.protocol import Restorable

REPLAY, FIRST, FUSED, PREFIX = HitKind


def up_to(longest: int) -> Restorable:
    return Restorable(longest)


def exactly(*lengths: int) -> Restorable:
    ascending = tuple(sorted(set(lengths)))
    return Restorable(ascending[-1] if ascending else 0, ascending)


restorables = st.one_of(
    st.builds(up_to, st.integers(0, 40)),
    st.lists(st.integers(1, 40), max_size=6).map(lambda lengths: exactly(*lengths)),
)


def as_set(restorable: Restorable) -> set[int]:
    if restorable.lengths is None:
        return set(range(1, restorable.longest + 1))
    return set(restorable.lengths)


@given(restorables, restorables, st.integers(0, 45))
def test_a_restorable_is_a_set_of_lengths(a: Restorable, b: Restorable, limit: int) -> None:
    both = a.common(b)
    assert as_set(both) == as_set(a) & as_set(b)
    assert both.longest == max(as_set(both), default=0)
    assert a.best(limit) == max((length for length in as_set(a) if length <= limit), default=0)


@pytest.mark.parametrize(
    ("restorable", "cached", "max_tokens", "expected"),
    [
        # 10 prompt tokens: P is 9.
        (up_to(0), (), 8, MISS),
        (up_to(3), (), 8, MISS),
        (up_to(4), (), 8, RestorePlan(4, PREFIX)),
        (up_to(8), (5, 6), 8, RestorePlan(8, PREFIX)),
        (up_to(9), (), 8, RestorePlan(9, FUSED)),
        (up_to(9), (5, 6), 8, RestorePlan(9, FUSED)),
        (up_to(10), (), 8, RestorePlan(9, FUSED)),
        (up_to(10), (5,), 8, RestorePlan(10, FIRST, (5,))),
        (up_to(10), (5, 6, 7), 8, RestorePlan(10, FIRST, (5,))),
        (up_to(11), (5, 6, 7), 8, RestorePlan(11, REPLAY, (5, 6))),
        (up_to(12), (5, 6, 7), 8, RestorePlan(12, REPLAY, (5, 6, 7))),
        (up_to(12), (5, 6, 7), 2, RestorePlan(11, REPLAY, (5, 6))),
        (up_to(12), (5, 6, 7), 1, RestorePlan(10, FIRST, (5,))),
        (exactly(5, 12), (5, 6, 7), 8, RestorePlan(12, REPLAY, (5, 6, 7))),
        (exactly(5, 12), (5, 6, 7), 2, RestorePlan(5, PREFIX)),
        (exactly(3, 12), (5, 6, 7), 2, MISS),
        (exactly(10), (), 8, MISS),
        (exactly(9, 10), (5, 6), 8, RestorePlan(10, FIRST, (5,))),
    ],
)
def test_the_order_of_the_ways(
    restorable: Restorable, cached: tuple[int, ...], max_tokens: int, expected: RestorePlan
) -> None:
    assert choose_restore(10, restorable, cached, 4, max_tokens) == expected


def test_a_whole_prefix_is_an_ordinary_one_when_nothing_is_fused() -> None:
    assert choose_restore(10, up_to(9), (), 4, 8, fused=False) == RestorePlan(9, PREFIX)


def test_a_prompt_of_one_token_or_below_the_minimum_restores_nothing() -> None:
    assert choose_restore(1, up_to(5), (5, 6), 1, 8) == MISS
    assert choose_restore(9, up_to(20), (5, 6), 10, 8) == MISS
    assert choose_restore(10, up_to(20), (5, 6), 10, 8) == RestorePlan(11, REPLAY, (5, 6))
    assert choose_restore(10, up_to(20), (), 10, 8) == MISS


@given(
    st.integers(1, 20),
    restorables,
    st.lists(st.integers(0, 9), max_size=8).map(tuple),
    st.integers(0, 12),
    st.integers(1, 10),
)
def test_the_choice_is_the_first_way_of_the_spec_that_works(
    n_prompt: int, restorable: Restorable, cached: tuple[int, ...], minimum: int, max_tokens: int
) -> None:
    lengths, prefill = as_set(restorable), n_prompt - 1
    ways: list[RestorePlan] = []
    if n_prompt >= minimum:
        counts = range(min(len(cached), max_tokens), 1, -1)
        ways += [RestorePlan(n_prompt + n - 1, REPLAY, cached[:n]) for n in counts]
        if cached:
            ways.append(RestorePlan(n_prompt, FIRST, cached[:1]))
    ways.append(RestorePlan(prefill, FUSED))
    ways += [RestorePlan(length, PREFIX) for length in range(prefill - 1, 0, -1)]
    usable = [way for way in ways if way.length in lengths and way.length >= minimum] if prefill else []
    plan = choose_restore(n_prompt, restorable, cached, minimum, max_tokens)
    assert plan == (usable[0] if usable else MISS)
    assert plan.length == (prefill + len(plan.tokens) if plan.tokens else plan.length)
    assert plan.tokens or plan.length <= prefill


SETTINGS = PrefixCacheSection()


def with_(**changes: object) -> PrefixCacheSection:
    return msgspec.structs.replace(SETTINGS, **changes)


ALL = Lookup(CacheStatus.MISS, restore=True, fused=True, first_token=True, replay=True)
NO_OUTPUT = Lookup(CacheStatus.MISS, restore=True, fused=True)


@pytest.mark.parametrize(
    ("settings", "request_", "expected"),
    [
        (SETTINGS, {}, ALL),
        (SETTINGS, {"native_mtp": True}, ALL),
        (with_(bypass_native_mtp=True), {"native_mtp": True}, Lookup(CacheStatus.BYPASS_NATIVE_MTP)),
        (with_(bypass_native_mtp=True), {}, ALL),
        (SETTINGS, {"draft_model": True}, Lookup(CacheStatus.MISS, restore=True)),
        (SETTINGS, {"replay_safe": False}, NO_OUTPUT),
        (SETTINGS, {"n_prompt": 1}, Lookup(CacheStatus.DISABLED)),
        (SETTINGS, {"n_prompt": 2}, ALL),
        (with_(mode="record"), {}, Lookup(CacheStatus.MISS)),
        (with_(mode="disabled"), {}, Lookup(CacheStatus.DISABLED)),
        (
            with_(mode="disabled", bypass_native_mtp=True),
            {"native_mtp": True},
            Lookup(CacheStatus.DISABLED),
        ),
        (with_(replay_tokens=0), {}, NO_OUTPUT),
        (
            with_(replay_tokens=1),
            {},
            Lookup(CacheStatus.MISS, restore=True, fused=True, first_token=True),
        ),
    ],
)
def test_which_ways_are_open(
    settings: PrefixCacheSection, request_: dict[str, object], expected: Lookup
) -> None:
    given_request = {"native_mtp": False, "draft_model": False, "n_prompt": 10, "replay_safe": True}
    assert lookup_bypass(settings, **{**given_request, **request_}) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (0b111, (3, 1_638_400, 3_276_800)),
        (0b1, (1, 1_638_400, 0)),
        (0, (0, 1_638_400, 0)),
        (-1, (0, 1_638_400, 0)),
    ],
)
def test_savings(mask: int, expected: tuple[int, int, int]) -> None:
    assert savings(100, 4096, mask) == expected


@pytest.mark.parametrize(
    ("plan", "cached", "suffix"),
    [
        (RestorePlan(12, REPLAY, (5, 6, 7)), 10, 0),
        (RestorePlan(10, FIRST, (5,)), 10, 0),
        (RestorePlan(9, FUSED), 9, 0),
        (RestorePlan(4, PREFIX), 4, 5),
    ],
)
def test_a_hit_is_reported_as_the_spec_counts_it(plan: RestorePlan, cached: int, suffix: int) -> None:
    stats = stats_of(ALL, plan, 10, hidden_size=8, hit_mask=0b11, restore_ms=1.5)
    assert stats == CacheStats(
        status=CacheStatus.HIT,
        hit_kind=plan.kind,
        cached_prompt_tokens=cached,
        matched_prefix_tokens=cached,
        suffix_prefill_tokens=suffix,
        restored_tokens=plan.length,
        restore_ms=1.5,
        hit_stage_count=2,
        stage0_bytes_avoided=plan.length * 32,
        interstage_bytes_avoided_estimate=plan.length * 32,
    )


@pytest.mark.parametrize("status", [CacheStatus.DISABLED, CacheStatus.MISS, CacheStatus.BYPASS_NATIVE_MTP])
def test_without_a_hit_the_status_says_why(status: CacheStatus) -> None:
    stats = stats_of(Lookup(status), MISS, 10, hidden_size=8, hit_mask=0, restore_ms=3.0)
    assert stats == CacheStats(status=status, suffix_prefill_tokens=9)


def test_the_record_as_json() -> None:
    assert json.loads(CacheStats().to_json()) == {
        "status": "disabled",
        "hit_kind": None,
        "cached_prompt_tokens": 0,
        "matched_prefix_tokens": 0,
        "suffix_prefill_tokens": 0,
        "restored_tokens": 0,
        "restore_ms": 0.0,
        "prompt_ms": 0.0,
        "predicted_ms": 0.0,
        "hit_stage_count": 0,
        "stage0_bytes_avoided": 0,
        "interstage_bytes_avoided_estimate": 0,
    }
    stats = CacheStats(status=CacheStatus.HIT, hit_kind=HitKind.PREFIX, prompt_ms=1 / 3)
    shown = json.loads(stats.to_json())
    assert (shown["status"], shown["hit_kind"], shown["prompt_ms"]) == ("hit", "chain_prefix", 0.333)
