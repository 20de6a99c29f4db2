"""D-04: stop strings are matched on text, across token boundaries, and never leak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.text.stops import StopMatcher


def shown(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    texts = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        texts.append(text)
        if stopped:
            assert matcher.push("more") == ("", True)
            assert matcher.flush() == ""
            return texts, True
    return [*texts, matcher.flush()], False


def naive(stops: list[str], text: str) -> tuple[str, bool]:
    """The text up to the start of the stop string that is completed first."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "texts", "stopped"),
    [
        ([" Paris"], ["It is", " Pa", "ris", "!"], ["It is", "", ""], True),
        (["ab"], ["xa", "by"], ["x", ""], True),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], True),
        (["aab"], ["aaa", "b"], ["a", ""], True),
        (["abc"], ["ab", "x"], ["", "abx", ""], False),
        (["abc"], ["x", "ab"], ["x", "", "ab"], False),
        (["bcd", "abcdx"], ["abcdx"], ["a"], True),
        (["b", "abc"], ["abc"], ["a"], True),
        (["bc", "abc"], ["ab", "c"], ["", ""], True),
        (["中文"], ["说中", "文字"], ["说", ""], True),
        (["end"], ["end"], [""], True),
        ([], ["any", "thing"], ["any", "thing", ""], False),
    ],
)
def test_table(stops: list[str], pieces: list[str], texts: list[str], stopped: bool) -> None:
    assert shown(stops, pieces) == (texts, stopped)


letters = st.text(alphabet="ab🙂", max_size=4)


@given(st.lists(letters.filter(bool), max_size=3), st.lists(letters, max_size=10))
def test_any_cut_gives_what_a_naive_search_of_the_whole_gives(stops: list[str], pieces: list[str]) -> None:
    texts, stopped = shown(stops, pieces)
    assert ("".join(texts), stopped) == naive(stops, "".join(pieces))


@given(st.lists(letters.filter(bool), min_size=1, max_size=3), st.lists(letters, max_size=10))
def test_nothing_is_held_back_without_need(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = "".join(pieces)
    so_far = ""
    for piece in pieces:
        out, stopped = matcher.push(piece)
        so_far += out
        if stopped:
            return
    held = text[len(so_far) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)
