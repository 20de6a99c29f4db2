"""The shelf of exact states: what is found, what is kept once, what goes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippy_stage.errors import SkippyError
from skippy_stage.prefix.states import StateShelf


def lengths(shelf: StateShelf, tokens: tuple[int, ...], namespace: str = "") -> list[int]:
    return [len(state.tokens) for state in shelf.find(namespace, tokens)]


def test_a_store_of_one_entry() -> None:
    """Spec 12.14."""
    shelf = StateShelf(max_entries=1, block_bytes=4)
    assert shelf.put("", (1, 2), b"aaaabbbb")
    assert shelf.put("", (1, 3), b"aaaacccc")
    assert len(shelf) == 1
    assert lengths(shelf, (1, 2)) == []
    (state,) = shelf.find("", (1, 3))
    assert (state.tokens, state.payload) == ((1, 3), b"aaaacccc")
    assert shelf.bytes == 8
    shelf.check_integrity()


def test_an_empty_key_is_an_error_and_leaves_nothing() -> None:
    """Spec 12.14."""
    shelf = StateShelf(max_entries=4, block_bytes=4)
    with pytest.raises(SkippyError, match="needs the tokens"):
        shelf.put("", (), b"aaaabbbb")
    assert (len(shelf), shelf.bytes) == (0, 0)
    shelf.check_integrity()


def test_all_recorded_prefixes_are_found_and_nothing_else() -> None:
    shelf = StateShelf(max_entries=9)
    for tokens in ((1,), (1, 2, 3), (1, 2, 3, 4, 5), (1, 9, 3), (2,)):
        shelf.put("", tokens, bytes(tokens))
    shelf.put("own", (1, 2), b"own")
    assert lengths(shelf, (1, 2, 3, 4)) == [1, 3]
    assert lengths(shelf, (1, 2, 3, 4, 5)) == [1, 3, 5]
    assert lengths(shelf, (1, 9, 3, 1)) == [1, 3]
    assert lengths(shelf, ()) == []
    assert lengths(shelf, (1, 2, 3), "own") == [2]
    assert lengths(shelf, (1, 2, 3), "none") == []


def test_what_is_there_is_kept_as_it_is_and_counts_as_used() -> None:
    shelf = StateShelf(max_entries=2)
    shelf.put("", (1,), b"one")
    shelf.put("", (2,), b"two")
    assert shelf.put("", (1,), b"other")
    shelf.put("", (3,), b"three")
    assert [lengths(shelf, (token,)) for token in (1, 2, 3)] == [[1], [], [1]]
    assert shelf.find("", (1,))[0].payload == b"one"
    assert shelf.evicted == 1


def test_leased_states_stay_and_a_new_one_goes_without() -> None:
    shelf = StateShelf(max_entries=1)
    shelf.put("", (1,), b"one")
    (state,) = shelf.find("", (1,))
    state.leases += 1
    assert not shelf.put("", (2,), b"two")
    assert state.payload == b"one"
    shelf.check_integrity([state])
    state.leases -= 1
    assert shelf.put("", (2,), b"two")
    assert not shelf.holds(state)
    assert state.payload == b""


def test_bytes_are_bounded() -> None:
    shelf = StateShelf(max_entries=9, max_bytes=10, block_bytes=4)
    assert shelf.put("", (1,), b"aaaabbbb")
    assert not shelf.put("", (4,), b"0123456789a"), "too large alone"
    assert lengths(shelf, (1,)) == [1], "nothing goes for what cannot be kept"
    assert shelf.put("", (2,), b"aaaa" * 50), "one block, however often"
    assert shelf.bytes == 8
    assert shelf.put("", (3,), b"ccccdd")
    assert [lengths(shelf, (token,)) for token in (1, 2, 3)] == [[], [1], [1]]
    assert shelf.bytes == 10
    shelf.check_integrity()


def test_a_removed_state_leaves_the_blocks_of_others() -> None:
    shelf = StateShelf(max_entries=9, block_bytes=4)
    shelf.put("", (1,), b"aaaabbbb")
    shelf.put("", (2,), b"aaaacccc")
    (one,), (two,) = shelf.find("", (1,)), shelf.find("", (2,))
    shelf.remove(one)
    shelf.remove(one)
    assert (two.payload, shelf.bytes, shelf.tokens) == (b"aaaacccc", 8, 1)
    shelf.check_integrity()
    shelf.remove(two)
    assert (len(shelf), shelf.bytes) == (0, 0)
    assert not shelf._lengths, "a namespace without states leaves nothing"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_against_a_list(data: Any) -> None:
    """Entries and bytes stay within their bounds, and nothing is lost before that."""
    entries, most = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 8, 20]))
    shelf = StateShelf(max_entries=entries, max_bytes=most, block_bytes=2)
    model: OrderedDict[tuple[int, ...], bytes] = OrderedDict()

    def size() -> int:
        return sum(map(len, {text[at : at + 2] for text in model.values() for at in range(0, len(text), 2)}))

    for _ in range(data.draw(st.integers(1, 30))):
        tokens = tuple(data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=4)))
        if data.draw(st.booleans()):
            payload = data.draw(st.text("ab", max_size=12)).encode()
            kept = shelf.put("", tokens, payload)
            if tokens not in model:
                alone = {payload[at : at + 2] for at in range(0, len(payload), 2)}
                assert kept == (not most or sum(map(len, alone)) <= most)
                if kept:
                    model[tokens] = payload
                    while len(model) > entries or 0 < most < size():
                        model.popitem(last=False)
            else:
                assert kept
                model.move_to_end(tokens)
        else:
            expected = [tokens[:n] for n in range(1, len(tokens) + 1) if tokens[:n] in model]
            found = shelf.find("", tokens)
            assert [(state.tokens, state.payload) for state in found] == [(t, model[t]) for t in expected]
            for prefix in expected:
                model.move_to_end(prefix)
        shelf.check_integrity()
        assert (len(shelf), shelf.bytes, shelf.tokens) == (len(model), size(), sum(map(len, model)))
