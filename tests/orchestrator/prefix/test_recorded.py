"""Beginnings of recorded prompts: found until the bound drops them, and nothing else is found."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefix.recorded import RecordedPrefixes


def test_a_beginning_is_enough_and_less_is_not() -> None:
    recorded = RecordedPrefixes()
    recorded.add("a", (1, 2, 3, 4, 5), 3)
    assert recorded.may_match("a", (1, 2, 3), 3)
    assert recorded.may_match("a", [1, 2, 3, 9, 9, 9], 3)
    assert not recorded.may_match("a", (1, 2), 3)
    assert not recorded.may_match("a", (1, 2, 4), 3)
    assert not recorded.may_match("b", (1, 2, 3), 3)
    assert not recorded.may_match("", (1, 2, 3), 3)


def test_less_than_the_minimum_is_never_recorded() -> None:
    recorded = RecordedPrefixes()
    recorded.add("a", (1, 2), 3)
    assert len(recorded) == 0


def test_tokens_do_not_run_over_into_the_namespace() -> None:
    recorded = RecordedPrefixes()
    recorded.add("a" * 8, (1, 2), 2)
    assert not recorded.may_match("", (1, 2, 0x6161616161616161), 3)


events = st.lists(
    st.tuples(
        st.booleans(), st.sampled_from(["", "x"]), st.lists(st.integers(0, 1), max_size=4), st.integers(1, 3)
    ),
    max_size=60,
)


@given(events, st.integers(1, 4))
def test_a_bounded_set_like_a_naive_one(
    events: list[tuple[bool, str, list[int], int]], capacity: int
) -> None:
    recorded = RecordedPrefixes(capacity)
    naive: OrderedDict[tuple[str, tuple[int, ...]], None] = OrderedDict()
    for adds, namespace, tokens, minimum in events:
        key = (namespace, tuple(tokens[:minimum]))
        if adds:
            recorded.add(namespace, tokens, minimum)
            if len(tokens) >= minimum:
                naive[key] = None
                naive.move_to_end(key)
                if len(naive) > capacity:
                    naive.popitem(last=False)
        else:
            assert recorded.may_match(namespace, tokens, minimum) == (key in naive and len(tokens) >= minimum)
            if key in naive and len(tokens) >= minimum:
                naive.move_to_end(key)
        assert len(recorded) == len(naive)
