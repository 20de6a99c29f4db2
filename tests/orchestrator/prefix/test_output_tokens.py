"""Output tokens: the rules of spec 4.7 and the rows of 12.14, then any order of events against a naive model."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefix.output_tokens import OutputKey, OutputTokenCache


def key(*prompt: int, namespace: str = "n", fingerprint: bytes = b"f", stages: str = "s") -> OutputKey:
    return OutputKey.of(prompt, namespace, fingerprint, stages)


A, B, C = key(1), key(2), key(3)


def filled(cache: OutputTokenCache, name: OutputKey, *tokens: int) -> None:
    for index, token in enumerate(tokens):
        assert cache.record_replay(name, tokens[:index], token) == index + 1


@pytest.mark.parametrize(("wanted", "capacity"), [(0, 1), (1, 1), (64, 64), (512, 512), (9000, 512)])
def test_capacity(wanted: int, capacity: int) -> None:
    assert OutputTokenCache(wanted).capacity == capacity


def test_every_part_of_the_key_keeps_output_apart() -> None:
    keys = {key(1, 2), key(2, 1), key(1), key(1, 2, namespace=""), key(1, 2, fingerprint=b"")}
    keys |= {key(1, 2, stages="t"), key(258), key()}
    assert len(keys) == 8
    assert key(1, 2) == OutputKey.of([1, 2], "n", b"f", "s")


def test_a_first_token_is_known_once_it_was_recorded() -> None:
    cache = OutputTokenCache(4)
    assert cache.first_token(A) is None
    assert cache.record_first_token(A, 5)
    assert not cache.record_first_token(A, 5)
    assert cache.first_token(A) == 5
    assert cache.first_token(B) is None
    assert cache.replay(A, 8) == (5,)


def test_another_first_token_starts_the_list_anew() -> None:
    cache = OutputTokenCache(4)
    filled(cache, A, 5, 6, 7)
    assert not cache.record_first_token(A, 5)
    assert cache.replay(A, 8) == (5, 6, 7)
    assert not cache.record_first_token(A, 9)
    assert cache.replay(A, 8) == (9,)


def test_a_list_grows_by_what_comes_behind_it() -> None:
    cache = OutputTokenCache(4)
    filled(cache, A, 5, 6, 7)
    for limit, tokens in [(0, ()), (-1, ()), (1, (5,)), (2, (5, 6)), (3, (5, 6, 7)), (8, (5, 6, 7))]:
        assert cache.replay(A, limit) == tokens


def test_eight_tokens_are_enough() -> None:
    cache = OutputTokenCache(4)
    filled(cache, A, *range(8))
    assert cache.record_replay(A, range(8), 8) is None
    assert cache.record_replay(A, range(20), 20) is None
    assert cache.record_replay(B, range(8), 8) is None
    assert cache.replay(A, 100) == tuple(range(8))
    assert len(cache) == 1


def test_a_longer_list_stays_as_it_is() -> None:
    cache = OutputTokenCache(4)
    filled(cache, A, *range(8))
    assert cache.record_replay(A, (0, 1), 9) == 8
    assert cache.record_replay(A, (7, 7), 9) == 8, "even when it is another one"
    assert cache.replay(A, 8) == tuple(range(8))


@pytest.mark.parametrize("previous", [(5, 7), (6, 5), (5, 6, 7), (5, 6, 7, 8)])
def test_a_list_that_differs_refuses(previous: tuple[int, ...]) -> None:
    cache = OutputTokenCache(4)
    filled(cache, A, 5, 6)
    assert cache.record_replay(A, previous, 9) is None
    assert cache.replay(A, 8) == (5, 6)
    assert cache.record_replay(B, previous, 9) is None
    assert cache.replay(B, 8) == ()
    assert cache.counters.refused == 2


@pytest.mark.parametrize("use", ["first_token", "replay", "record_first_token", "record_replay"])
def test_the_least_recently_used_prompt_is_dropped(use: str) -> None:
    cache = OutputTokenCache(2)
    filled(cache, A, 5, 6)
    filled(cache, B, 5)
    match use:
        case "first_token":
            cache.first_token(A)
        case "replay":
            cache.replay(A, 8)
        case "record_first_token":
            cache.record_first_token(A, 5)
        case "record_replay":
            cache.record_replay(A, (), 5)
    filled(cache, C, 5)
    assert cache.replay(B, 8) == ()
    assert cache.replay(A, 8) == (5, 6)
    assert cache.counters.evicted == 1


def test_counters() -> None:
    cache = OutputTokenCache(2)
    filled(cache, A, 5, 6)
    cache.replay(A, 8)
    cache.first_token(A)
    cache.replay(B, 8)
    counters = cache.counters
    assert (counters.lookups, counters.hits, counters.served) == (3, 2, 3)
    assert (counters.recorded, counters.refused, counters.evicted) == (2, 0, 0)


names = st.sampled_from([A, B, C])
tokens = st.integers(0, 1)
events = st.lists(
    st.one_of(
        st.tuples(st.just("first"), names, st.none(), tokens),
        st.tuples(st.just("replay"), names, st.lists(tokens, max_size=9), tokens),
        st.tuples(st.just("continue"), names, st.none(), tokens),
        st.tuples(st.just("lookup"), names, st.none(), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(events, st.integers(1, 3))
def test_any_events_against_the_rules_of_the_spec(
    events: list[tuple[str, OutputKey, list[int] | None, int]], capacity: int
) -> None:
    cache, naive = OutputTokenCache(capacity), OrderedDict[OutputKey, list[int]]()
    for kind, name, previous, value in events:
        known = naive.get(name, [])
        if known and not (kind == "replay" and len(previous or []) >= 8):
            naive.move_to_end(name)
        match kind:
            case "first":
                assert cache.record_first_token(name, value) == (not known)
                if known[:1] != [value]:
                    naive[name] = [value]
            case "lookup":
                assert cache.replay(name, value) == tuple(known[:value])
            case _:
                before = list(known[:7]) if previous is None else previous
                result = cache.record_replay(name, before, value)
                if len(before) >= 8:
                    assert result is None
                elif len(known) > len(before):
                    assert result == min(len(known), 8)
                elif known != before:
                    assert result is None
                else:
                    naive[name] = [*before, value]
                    assert result == len(before) + 1
        if len(naive) > capacity:
            naive.popitem(last=False)
        cache.check_integrity()
        assert len(cache) == len(naive)
    for name in (A, B, C):
        assert cache.replay(name, 8) == tuple(naive.get(name, ()))
