"""One session: its steps, and the one place where tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefill import FixedChunks
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.sessions import Commit, Phase, Session
from skippy_stage.protocol import DecodeStep, OpenStep, PrefillStep, RowStep, SamplingParams

END, STOP = 250, 99
SAMPLING = SamplingParams(temperature=0.5, seed=4)


class LetterText:
    """A letter for every token; holds one back, and stops at STOP without showing it."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        shown, self._held = self._held, chr(ord("a") + token % 26)
        if token == STOP:
            self._held = ""
            return shown, True
        return shown, False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def session(
    prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 5, *, ignore_eos: bool = False, size: int = 8
) -> Session:
    request = GenerationRequest(
        prompt=tuple(prompt), max_tokens=max_tokens, sampling=SAMPLING, ignore_eos=ignore_eos
    )
    return Session(7, request, LetterText(), frozenset({END, END + 1}), FixedChunks(size), credits=2)


def dispatch(s: Session, room: int = 100) -> RowStep:
    step = s.next_step(room)
    assert step is not None
    s.dispatch(step)
    return step


def test_from_the_prompt_to_the_last_token() -> None:
    s = session([1, 2, 3], 2)
    assert (s.n_prompt, s.n_output, s.max_positions, s.on_stages) == (3, 0, 5, False)
    prefill = s.next_step(100)
    assert prefill == PrefillStep(session=7, epoch=0, pos_start=0, rows=3, sample=True)
    assert s.phase is Phase.PREFILL
    opening, tokens = s.dispatch(prefill)
    assert opening == OpenStep(session=7, max_tokens=5, sampling=SAMPLING)
    assert list(tokens) == [1, 2, 3]
    assert (s.phase, s.steps_in_flight, s.on_stages) == (Phase.DECODE, 1, True)
    assert s.next_step(100) is None, "the first token is not known yet"
    s.left_first_stage(prefill)
    assert s.complete(prefill, [10]) == Commit(7, (10,), "")
    decode = s.next_step(1)
    assert decode == DecodeStep(session=7, epoch=0, pos_start=3)
    opening, tokens = s.dispatch(decode)
    assert (opening, list(tokens)) == (None, [10])
    s.left_first_stage(decode)
    assert s.complete(decode, [11]) == Commit(7, (11,), "kl", "length")
    assert (s.phase, s.n_output) == (Phase.ENDED, 2)
    assert s.next_step(100) is None
    s.check_integrity()


def test_a_prompt_in_chunks_opens_once_and_commits_after_the_last() -> None:
    s = session(range(1, 21))
    first = s.next_step(100)
    assert first is not None
    opening, tokens = s.dispatch(first)
    assert opening is not None
    assert list(tokens) == list(range(1, 9))
    second = s.next_step(100)
    assert second == PrefillStep(session=7, epoch=0, pos_start=8, rows=8)
    opening, tokens = s.dispatch(second)
    assert (opening, list(tokens)) == (None, list(range(9, 17)))
    assert s.next_step(100) is None, "credits are out"
    s.left_first_stage(first)
    third = dispatch(s)
    assert third == PrefillStep(session=7, epoch=0, pos_start=16, rows=4, sample=True)
    assert s.complete(first, []) is None
    with pytest.raises(ValueError, match="session 7: result out of order"):
        s.complete(third, [1])
    s.left_first_stage(second)
    assert s.complete(second, []) is None
    s.left_first_stage(third)
    assert s.complete(third, [1]) == Commit(7, (1,), "")
    s.check_integrity()


def test_no_room_is_no_step() -> None:
    s = session()
    assert s.next_step(0) is None
    s.complete(dispatch(s), [1])
    assert s.next_step(0) is None


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "committed", "text", "reason"),
    [
        ([1, 2], 5, (1, 2), "b", ""),
        ([1, 2], 2, (1, 2), "bc", "length"),
        ([1, 2, 3], 2, (1, 2), "bc", "length"),
        ([END], 5, (), "", "stop"),
        ([1, END, 2], 5, (1,), "b", "stop"),
        ([1, END + 1], 5, (1,), "b", "stop"),
        ([1, 2, END], 2, (1, 2), "bc", "length"),
        ([1, STOP, 2], 5, (1, STOP), "b", "stop"),
        ([1, STOP], 2, (1, STOP), "b", "stop"),
        ([1, STOP, END], 5, (1, STOP), "b", "stop"),
    ],
)
def test_where_a_span_ends(
    tokens: list[int], max_tokens: int, committed: tuple[int, ...], text: str, reason: str
) -> None:
    s = session(max_tokens=max_tokens)
    assert s.commit(tokens) == Commit(7, committed, text, reason)
    assert s.n_output == len(committed)
    assert s.finish_reason == reason
    assert (s.phase is Phase.ENDED) == bool(reason)


def test_end_tokens_are_ordinary_for_who_ignores_them() -> None:
    s = session(ignore_eos=True)
    assert s.commit([END, 1]) == Commit(7, (END, 1), chr(ord("a") + END % 26), "")


def test_results_of_a_dead_epoch_are_ignored() -> None:
    s = session()
    step = dispatch(s)
    s.epoch = 1
    assert s.complete(step, [5]) is None
    assert (s.n_output, s.steps_in_flight) == (0, 0)
    again = dispatch(s)
    assert again.epoch == 1
    assert s.complete(again, [6]) == Commit(7, (6,), "")


def test_after_the_end_nothing_is_committed() -> None:
    s = session(range(1, 21))
    first, second = dispatch(s), dispatch(s)
    s.end()
    assert s.next_step(100) is None
    for step in (first, second):
        s.left_first_stage(step)
        assert s.complete(step, [5]) is None
    assert (s.n_output, s.finish_reason) == (0, "")
    s.check_integrity()


def test_a_count_above_the_limit_is_found() -> None:
    s = session(max_tokens=2)
    s.commit([1])
    s._context += [2, 3]
    with pytest.raises(AssertionError, match="3 tokens of 2"):
        s.check_integrity()


tokens = st.sampled_from([1, 2, 3, END, STOP])


@given(st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=8), st.integers(1, 9), st.booleans())
def test_spans_do_not_matter(spans: list[list[int]], max_tokens: int, ignore_eos: bool) -> None:
    """However tokens come in spans, the whole is the same as one token after the other."""
    expected: list[int] = []
    reason = ""
    for token in [token for span in spans for token in span]:
        if token == END and not ignore_eos:
            reason = "stop"
        else:
            expected.append(token)
            if token == STOP:
                reason = "stop"
            elif len(expected) == max_tokens:
                reason = "length"
        if reason:
            break
    s = session(max_tokens=max_tokens, ignore_eos=ignore_eos)
    got: list[int] = []
    text = ""
    for span in spans:
        if s.phase is Phase.ENDED:
            break
        commit = s.commit(span)
        got += commit.tokens
        text += commit.text
    assert (got, s.finish_reason) == (expected, reason)
    shown = "".join(chr(ord("a") + token % 26) for token in expected if token != STOP)
    assert text == (shown if reason else shown[:-1])
