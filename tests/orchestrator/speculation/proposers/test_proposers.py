"""N-gram proposers: the tables of spec 12.9 and 12.10, and naive models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.deployment.speculation import NgramKind, NgramSection
from skippy_orchestrator.speculation.proposers import Proposer, make_proposer

from tests.orchestrator.speculation.reference import Suffix


def proposer(kind: NgramKind, least: int, most: int, proposal: int, *, resume: bool = False) -> Proposer:
    section = NgramSection(
        kind=kind, min_ngram=least, max_ngram=most, max_proposal_tokens=proposal, resume=resume
    )
    return make_proposer(section)


def tokens(text: str) -> list[int]:
    """``11-22`` is a range with both ends."""
    found: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def blocks(count: int, offset: int) -> list[int]:
    return [token for p in range(count) for token in (200 + p, 1, 2, 3, 4, 5, 200 + p + offset)]


# Suffix (12.9)


@pytest.mark.parametrize(
    ("parameters", "history", "continuation", "asked", "expected"),
    [
        ((3, 16, 8), "1 2 3 4 5 6 8 9 2 3 4 7 8", "1 2 3 4", 2, "5 6"),
        ((3, 16, 7), "11-22 11-15", "", 16, "16-22"),
        ((5, 16, 8), "1 2 3 4 9 2 3 4", "", 4, ""),
        ((8, 16, 3), "1-9 1-8", "", 8, "9 1 2"),
    ],
)
def test_suffix(
    parameters: tuple[int, int, int], history: str, continuation: str, asked: int, expected: str
) -> None:
    suffix = proposer("suffix", *parameters)
    suffix.follow(tokens(history))
    assert suffix.propose(tokens(continuation), asked) == tokens(expected)


def test_a_continuation_leaves_the_index_unchanged() -> None:
    suffix = proposer("suffix", 3, 16, 4)
    suffix.follow([1, 2, 3, 1, 2, 3, 1, 2])
    assert [suffix.propose(c, 2) for c in ([], [9], [])] == [[3, 1], [], [3, 1]]


def test_a_history_grows_and_is_indexed_anew_when_it_is_another_one() -> None:
    suffix = proposer("suffix", 3, 16, 4)
    suffix.follow([1, 2, 3, 4])
    assert suffix.propose([], 4) == []
    assert suffix.stats.appended_tokens == 4
    suffix.follow([1, 2, 3, 4, 1, 2, 3])
    assert suffix.propose([], 4) == [4, 1, 2, 3]
    assert (suffix.stats.appended_tokens, suffix.stats.rebuilds) == (7, 0)
    suffix.follow([9, 1, 2, 3])
    assert suffix.propose([], 4) == []
    assert suffix.stats.rebuilds == 1


def test_a_longer_match_wins_over_more_recent_ones() -> None:
    suffix = proposer("suffix", 5, 16, 8)
    suffix.follow([100, 1, 2, 3, 4, 5, 9, 10, 11, *blocks(12, 100), 100, 1, 2, 3, 4, 5])
    assert suffix.propose([], 3) == [9, 10, 11]
    assert suffix.stats.candidates_examined > 8


def test_no_more_candidates_are_examined_than_64() -> None:
    suffix = proposer("suffix", 5, 16, 8)
    history = [*blocks(100, 1000), 7, 1, 2, 3, 4, 5]
    suffix.follow(history)
    assert suffix.propose([], 3) == [200 + 99 + 1000, 7, 1]
    assert suffix.stats.candidates_examined == 64


PARTS = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6)
SUFFIX = st.tuples(st.integers(3, 10), st.integers(10, 20), st.integers(1, 12))


@given(PARTS, st.lists(st.integers(0, 3), max_size=10), st.integers(0, 12), SUFFIX)
def test_suffix_equals_a_search_without_an_index(
    parts: list[list[int]], continuation: list[int], asked: int, parameters: tuple[int, int, int]
) -> None:
    suffix, naive = proposer("suffix", *parameters), Suffix(*parameters)
    history: list[int] = []
    for part in parts:
        history += part
        suffix.follow(history)
        for after in (continuation, [], continuation):
            assert suffix.propose(after, asked) == naive.propose(history, after, asked)


# A copy with edits (ours)

SOURCE = [*range(100, 130), 7]


@pytest.mark.parametrize(
    ("copied", "expected"),
    [
        ([*range(100, 112), 1], range(113, 121)),
        ([*range(100, 112), 1, 113], range(114, 122)),
        ([*range(100, 112), 113], range(114, 122)),
        ([*range(100, 112), 1, 2], ()),
        ([*range(100, 112), 1, *range(113, 117)], range(117, 125)),
        ([*range(100, 112), 1, *range(113, 123), 1], range(124, 130)),
        ([*range(100, 107), 1], ()),
        ([1], ()),
    ],
)
def test_a_copy_is_followed_past_one_token_that_differs(copied: list[int], expected: Sequence[int]) -> None:
    suffix = proposer("suffix", 3, 32, 32, resume=True)
    for end in range(len(SOURCE), len(SOURCE) + len(copied) + 1):
        suffix.follow([*SOURCE, *copied][:end])
        proposed = suffix.propose((), 8)
    assert proposed[: len(expected)] == list(expected)
    assert bool(proposed) == bool(expected)
    assert suffix.stats.proposed_tokens >= len(proposed)


@given(st.lists(st.integers(1, 5), max_size=60), st.integers(1, 12), st.lists(st.integers(1, 5), max_size=4))
def test_a_resumed_copy_takes_nothing_from_what_a_match_gives(
    text: list[int], limit: int, behind: list[int]
) -> None:
    """Same drafts wherever a suffix matches; only where none does there is something more, out of the text."""
    plain, resumes = (proposer("suffix", 3, 16, 12, resume=resume) for resume in (False, True))
    for end in range(1, len(text) + 1):
        for each in (plain, resumes):
            each.follow(text[:end])
        expected, drafts = plain.propose((), limit), resumes.propose((), limit)
        if expected:
            assert drafts == expected
        elif drafts:
            assert len(drafts) <= min(limit, 8)
            assert any(text[i : i + len(drafts)] == drafts for i in range(end - len(drafts) + 1))
        assert resumes.propose(behind, limit) == plain.propose(behind, limit) or not behind


# Cache (12.10)


def test_cache() -> None:
    cache = proposer("cache", 2, 4, 3)
    cache.follow([1, 2, 3, 4])
    assert cache.propose([], 3) == []
    cache.follow([1, 2, 3, 1, 2, 3, 1, 2])
    assert cache.propose([], 3) == [3, 1, 2]


def test_the_most_frequent_follower_wins_and_the_most_recent_of_equals() -> None:
    cache = proposer("cache", 1, 1, 1)
    cache.follow([1, 5, 1, 6])
    assert cache.propose([1], 1) == [6]
    cache.follow([1, 5, 1, 6, 1, 5])
    assert cache.propose([1], 1) == [5]
    cache.follow([1, 5, 1, 6, 1, 5, 1, 6])
    assert cache.propose([1], 1) == [6]


def naive_cache(
    history: Sequence[int], continuation: Sequence[int], least: int, most: int, count: int
) -> list[int]:
    query, draft = [*history, *continuation], []
    while len(draft) < count:
        followers: list[int] = []
        for length in range(most, least - 1, -1):
            if length <= len(query):
                ends = range(length, len(history))
                followers = [history[e] for e in ends if list(history[e - length : e]) == query[-length:]]
            if followers:
                break
        if not followers:
            break
        # The winner among equals is who reached the highest count last.
        best, counts = -1, Counter[int]()
        for token in followers:
            counts[token] += 1
            best = token if best < 0 or counts[token] >= counts[best] else best
        draft.append(best)
        query.append(best)
    return draft


@given(
    PARTS, st.lists(st.integers(0, 3), max_size=5), st.integers(1, 3), st.integers(0, 1), st.integers(0, 8)
)
def test_cache_equals_counting_anew(
    parts: list[list[int]], continuation: list[int], least: int, more: int, asked: int
) -> None:
    cache = proposer("cache", least, least + more, 6)
    history: list[int] = []
    for part in parts:
        history += part
        cache.follow(history)
        expected = naive_cache(history, continuation, least, least + more, min(asked, 6))
        assert cache.propose(continuation, asked) == expected
        assert cache.propose(continuation, asked) == expected


# Simple


@given(
    PARTS, st.lists(st.integers(0, 3), max_size=5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 8)
)
def test_simple_equals_a_search_from_the_end(
    parts: list[list[int]], continuation: list[int], least: int, more: int, asked: int
) -> None:
    simple = proposer("simple", least, least + more, 6)
    history: list[int] = []

    def expected() -> list[int]:
        query = [*history, *continuation]
        for length in range(least + more, least - 1, -1):
            for end in range(len(history) - 1, length - 1, -1):
                if len(query) >= length and history[end - length : end] == query[-length:]:
                    return history[end : end + min(asked, 6)]
        return []

    for part in parts:
        history += part
        simple.follow(history)
        assert simple.propose(continuation, asked) == expected()


# All


class Counted(Sequence[int]):
    """A history that counts how many of its tokens are read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole history is read")

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.read += len(range(len(self.tokens))[index]) if isinstance(index, slice) else 1
        return self.tokens[index]


@pytest.mark.parametrize("kind", ["suffix", "cache", "simple"])
def test_the_work_for_a_token_does_not_grow_with_the_history(kind: NgramKind) -> None:
    subject = proposer(kind, 3, 4, 8)
    history = Counted([1, 2, 3, 4, 5, 6, 7] * 40)
    subject.follow(history)
    reads = []
    for size in range(2000):
        history.tokens.append(size % 7 + 1)
        before = history.read
        subject.follow(history)
        assert subject.propose([], 8)
        reads.append(history.read - before)
    assert max(reads) == min(reads) <= 16
    stats = subject.stats
    assert stats.hits <= stats.attempts
    assert stats.appended_tokens == len(history.tokens)
    assert stats.proposed_tokens >= stats.hits
    assert stats.match_length_sum >= stats.match_length_max > 0
    assert stats.rebuilds == 0
