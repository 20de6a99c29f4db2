"""What of a window is committed: the tables of spec 12.6, 12.7."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.speculation.classify import (
    Outcome,
    SerialDecision,
    WindowDecision,
    classify_serial,
    classify_window,
    split_len,
    threshold_met,
    under_threshold,
)


@pytest.mark.parametrize(
    ("drafts", "predicted", "max_tokens", "threshold", "ends", "expected"),
    [
        ([10, 20, 30], [10, 20, 30], 16, 1.0, (), (Outcome.FULL_ACCEPT, 3, 3)),
        ([10, 20, 30, 40], [10, 99, 30, 40], 16, 0.5, (), (Outcome.EARLY_REJECT, 0, 1)),
        ([10, 20, 30, 40], [10, 99, 30, 40], 16, 0.0, (), (Outcome.EARLY_REJECT, 1, 2)),
        ([10, 20, 30], [10, 99, 99], 16, 1.0, (10,), (Outcome.ACCEPTED_STOP, 1, 1)),
        ([10, 20, 30], [10, 99, 30], 2, 1.0, (), (Outcome.EARLY_REJECT_STOP, 1, 2)),
        ([10, 20, 30], [10, 20, 99], 16, 0.0, (), (Outcome.TAIL_REJECT, 2, 3)),
    ],
)
def test_windows_without_a_free_token(
    drafts: Sequence[int],
    predicted: Sequence[int],
    max_tokens: int,
    threshold: float,
    ends: Sequence[int],
    expected: tuple[Outcome, int, int],
) -> None:
    decision = classify_serial(drafts, predicted, 0, max_tokens, threshold, ends)
    assert decision == SerialDecision(*expected)


def test_fewer_predictions_than_drafts_are_an_error() -> None:
    with pytest.raises(ValueError, match="1 predictions for 2 drafts"):
        classify_serial([10, 20], [10], 0, 16, 0.0, ())


@pytest.mark.parametrize(
    ("accepted", "drafts", "threshold", "met"), [(2, 4, 0.5, True), (0, 0, 1.0, True), (1, 4, 0.5, False)]
)
def test_threshold(accepted: int, drafts: int, threshold: float, met: bool) -> None:
    assert threshold_met(accepted, drafts, threshold) is met
    decision = WindowDecision(accepted, accepted + 1, True)
    expected = decision if met else WindowDecision(0, 1, True)
    assert under_threshold(decision, drafts, threshold) == expected


@pytest.mark.parametrize(
    ("tokens", "predicted", "expected"),
    [([11, 12, 13], [11, 12, 13, 14], (3, 4, False)), ([11, 12], [11, 42], (1, 2, True))],
)
def test_windows_with_a_free_token(
    tokens: Sequence[int], predicted: Sequence[int], expected: tuple[int, int, bool]
) -> None:
    assert classify_window(tokens, predicted, 0, 16, ()) == WindowDecision(*expected)


@pytest.mark.parametrize(
    ("predicted", "message"), [([11], "ended before a decision"), ([11, 12], "omitted the token behind")]
)
def test_predictions_that_decide_nothing_are_an_error(predicted: Sequence[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classify_window([11, 12], predicted, 0, 16, ())


def test_a_window_that_reaches_the_end_commits_no_more() -> None:
    assert classify_window([1, 2, 3], [1, 2, 3, 4], 5, 8, ()) == WindowDecision(3, 3, False)
    assert classify_window([1, 2, 3], [1, 2, 3, 4], 5, 7, ()) == WindowDecision(2, 2, False)
    assert classify_window([1, 2, 3], [1, 2, 3, 4], 5, 9, ()) == WindowDecision(3, 4, False)
    assert classify_window([1, 2, 3], [1, 2, 3, 4], 0, 9, (2,)) == WindowDecision(2, 2, False)


@pytest.mark.parametrize(
    ("tokens", "probability", "expected"),
    [
        (8, 0.1, "5 4 3 2 1 8 7 6 5 4 3 2"),
        (8, 0.25, "2 1 3 2 1 5 4 3 2 1 3 2"),
        (8, 0.3, "2 1 3 2 1 5 4 3 2 1 3 2"),
        (8, 0.5, "2 1 2 1 1 2 1 3 2 1 2 1"),
        (8, 0.8, "1 1 2 1 1 1 1 2 1 1 1 1"),
        (4, 0.1, "4 4 3 2 1 4 4 4 4 4 3 2"),
        (4, 0.3, "2 1 3 2 1 4 4 3 2 1 3 2"),
    ],
)
def test_split_len(tokens: int, probability: float, expected: str) -> None:
    assert [split_len(tokens, probability, seed) for seed in range(12)] == [int(n) for n in expected.split()]


def test_split_len_without_a_choice() -> None:
    assert split_len(8, 0, 7) == 8
    assert split_len(8, 1, 7) == 1
    assert split_len(1, 0.5, 7) == 1


@given(st.integers(1, 64), st.floats(0, 1), st.integers(0, 2**64))
def test_split_len_is_a_length_and_always_the_same(tokens: int, probability: float, seed: int) -> None:
    length = split_len(tokens, probability, seed)
    assert 1 <= length <= tokens
    assert length == split_len(tokens, probability, seed)
