"""One session: its steps, and the one place where tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.deployment.speculation import NgramSection, SpeculationPlan, VerifyWindowSection
from skippy_orchestrator.frames import StageReport
from skippy_orchestrator.prefill import ComputeSample, PrefillStats
from skippy_orchestrator.prefix.outcome import CacheStats, CacheStatus
from skippy_orchestrator.prefix.session import OFF
from skippy_orchestrator.sessions import Commit, Dispatched, Phase, Session, SessionStep
from skippy_orchestrator.speculation.counters import SpeculationCounters
from skippy_orchestrator.speculation.windows import WindowStats
from skippy_stage.protocol import (
    DecodeStep,
    OpenStep,
    PrefillStep,
    SamplingParams,
    StepOk,
    StopStep,
    VerifyStep,
    rows_of,
)

from tests.orchestrator.making import a_request, fixed

END, STOP = 250, 99
SAMPLING = SamplingParams(temperature=0.5, seed=4)
REPORT = StageReport(rows=8, compute_us=1000, call_us=1000)


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
    request = a_request(prompt, max_tokens, sampling=SAMPLING, ignore_eos=ignore_eos)
    s = Session(7, request, LetterText(), frozenset({END, END + 1}), fixed(size))
    s.begin(OFF, 1.0)
    return s


def dispatch(s: Session, room: int = 100) -> SessionStep:
    step = s.next_step(room, 1.0)
    assert step is not None
    s.dispatch(step, 1.0)
    return step


def complete(s: Session, step: SessionStep, *tokens: int, now: float = 2.0) -> Commit | None:
    """The step has gone all the way."""
    if isinstance(step, PrefillStep):
        s.left_stage(step, 0, REPORT)
        s.credit_returned(now)
    return s.complete(step, StepOk(tokens=tokens), now)


def test_until_it_has_its_place_a_session_only_waits() -> None:
    s = Session(7, a_request([1, 2, 3], 5), LetterText(), frozenset(), fixed(8))
    assert s.phase is Phase.WAITING
    assert s.next_step(100, 0.0) is None
    assert (s.max_positions, s.steps_in_flight, s.on_stages, s.prefill) == (8, 0, False, None)
    s.check_integrity()
    s.begin(OFF, 1.0)
    assert s.phase is Phase.PREFILL
    assert dispatch(s) == PrefillStep(session=7, epoch=0, pos_start=0, rows=3, sample=True)


def test_from_the_prompt_to_the_last_token() -> None:
    s = session([1, 2, 3], 2)
    assert (s.n_prompt, s.n_output, s.max_positions, s.on_stages) == (3, 0, 5, False)
    prefill = s.next_step(100, 1.0)
    assert prefill == PrefillStep(session=7, epoch=0, pos_start=0, rows=3, sample=True)
    assert s.phase is Phase.PREFILL
    opening = OpenStep(session=7, max_tokens=5, sampling=SAMPLING)
    assert s.dispatch(prefill, 1.0) == Dispatched((opening,), [1, 2, 3], ())
    assert (s.phase, s.steps_in_flight, s.on_stages) == (Phase.DECODE, 1, True)
    assert s.next_step(100, 1.0) is None, "the first token is not known yet"
    assert complete(s, prefill, 10, now=1.5) == Commit(7, (10,), "")
    decode = s.next_step(1, 1.5)
    assert decode == DecodeStep(session=7, epoch=0, pos_start=3)
    assert s.dispatch(decode, 1.5) == Dispatched((), (10,), ())
    cache = CacheStats(
        status=CacheStatus.DISABLED, suffix_prefill_tokens=2, prompt_ms=500.0, predicted_ms=250.0
    )
    speculation = SpeculationCounters(serial_steps=1, in_flight=WindowStats(occupancy_s=[0.0, 0.0]))
    assert complete(s, decode, 11, now=1.75) == Commit(7, (11,), "kl", "length", cache, speculation)
    assert (s.phase, s.n_output, list(s.context)) == (Phase.ENDED, 2, [1, 2, 3, 10, 11])
    assert s.next_step(100, 2.0) is None
    assert s.closing() == (StopStep(session=7),)
    s.check_integrity()


def test_a_prompt_in_chunks_opens_once_and_commits_after_the_last() -> None:
    s = session(range(1, 21))
    first = s.next_step(100, 1.0)
    assert isinstance(first, PrefillStep)
    sent = s.dispatch(first, 1.0)
    assert len(sent.before) == 1
    assert list(sent.tokens) == list(range(1, 9))
    second = s.next_step(100, 1.0)
    assert second == PrefillStep(session=7, epoch=0, pos_start=8, rows=8)
    assert s.dispatch(second, 1.0) == Dispatched((), list(range(9, 17)), ())
    assert s.next_step(100, 1.0) is None, "credits are out"
    s.left_stage(first, 0, REPORT)
    assert s.next_step(100, 1.0) is None, "it has not reached the second stage"
    s.credit_returned(1.0)
    third = dispatch(s)
    assert third == PrefillStep(session=7, epoch=0, pos_start=16, rows=4, sample=True)
    assert s.phase is Phase.DECODE
    assert s.complete(first, StepOk(), 1.0) is None
    with pytest.raises(ValueError, match="session 7: result out of order"):
        s.complete(third, StepOk(tokens=(1,)), 1.0)
    assert complete(s, second) is None
    assert complete(s, third, 1) == Commit(7, (1,), "")
    s.check_integrity()


def test_no_room_is_no_step() -> None:
    s = session()
    assert s.next_step(0, 1.0) is None
    complete(s, dispatch(s), 1)
    assert s.next_step(0, 1.0) is None


def test_a_chunks_time_at_a_stage_is_its_share_of_the_frames_rows() -> None:
    s = session(range(1, 21))
    first = dispatch(s)
    assert isinstance(first, PrefillStep)
    assert s.prefill is not None
    s.left_stage(first, 0, StageReport(rows=32, compute_us=8000, queue_us=700, call_us=9000))
    s.left_stage(first, 2, StageReport(rows=16, compute_us=4001, queue_us=5, call_us=4106, sent_bytes=320))
    report = s.prefill.report()
    assert report.sample == ComputeSample(2.0, 8)
    assert report.write_ms_max == pytest.approx(0.3), "the write is the frame's, whoever was in it"
    assert report.replies == PrefillStats(
        edge_write_us_max=100,
        edge_wait_us_max=5,
        edge_total_us_max=105,
        edge_stage_index=2,
        edge_activation_bytes_max=160,
        edge_observation_count=1,
        compute_us_at_slowest_rate=2000,
        compute_token_count_at_slowest_rate=8,
        compute_stage_index=2,
        compute_observation_count=1,
    )


def test_a_report_of_fewer_rows_than_the_chunk_has_is_taken_as_its_own() -> None:
    s = session(range(1, 21))
    first = dispatch(s)
    assert isinstance(first, PrefillStep)
    s.left_stage(first, 0, StageReport(rows=0, compute_us=10, call_us=10))
    assert s.prefill is not None
    assert s.prefill.report().sample == ComputeSample(0.01, 8)


def test_the_first_predictions_are_kept_the_end_token_included() -> None:
    s = session(max_tokens=50)
    s.commit([1, 2, 3], 1.0)
    assert s.predicted == [1, 2, 3]
    s.commit([4, END], 1.0)
    assert s.predicted == [1, 2, 3, 4, END]
    long = session(max_tokens=50)
    long.commit(list(range(1, 13)), 1.0)
    assert long.predicted == list(range(1, 9))
    assert long.n_output == 12


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
    commit = s.commit(tokens, 1.0)
    assert commit == Commit(7, committed, text, reason, commit.cache, commit.speculation)
    assert (commit.cache is not None) == bool(reason), "the last span says what the caches did"
    assert commit.speculation == (SpeculationCounters() if reason else None)
    assert s.n_output == len(committed)
    assert s.finish_reason == reason
    assert (s.phase is Phase.ENDED) == bool(reason)


def test_end_tokens_are_ordinary_for_who_ignores_them() -> None:
    s = session(ignore_eos=True)
    assert s.commit([END, 1], 1.0) == Commit(7, (END, 1), chr(ord("a") + END % 26), "")


WINDOWS = SpeculationPlan(
    ngram=NgramSection(kind="suffix", min_ngram=3, max_ngram=8, max_proposal_tokens=8),
    verify_window=VerifyWindowSection(max_tokens=3, pipeline_depth=2),
)


def windows_in_flight() -> tuple[Session, SessionStep, SessionStep]:
    """A session that expects 1 2 3 4 5 6 ... again, with two windows in flight."""
    request = a_request([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 20, speculation=WINDOWS)
    s = Session(7, request, LetterText(), frozenset({END}), fixed(16))
    s.begin(OFF, 1.0)
    assert not s.wants_step
    assert complete(s, dispatch(s), 3) == Commit(7, (3,), "")
    assert s.wants_step
    first, second = dispatch(s), dispatch(s)
    assert first == VerifyStep(session=7, epoch=0, pos_start=10, rows=4, window=1)
    assert second == VerifyStep(session=7, epoch=0, pos_start=14, rows=3, window=2)
    assert (s.wants_step, s.steps_in_flight) == (False, 2), "as many as the depth allows"
    return s, first, second


def test_windows_in_flight_are_committed_one_by_one() -> None:
    s, first, second = windows_in_flight()
    commit = complete(s, first, 4, 5, 6, 7)
    assert commit is not None
    assert (commit.tokens, s.epoch) == ((4, 5, 6), 0), "the token behind a window is the next one's to commit"
    commit = complete(s, second, 8, 1, 2)
    assert commit is not None
    assert list(s.context[11:]) == [4, 5, 6, 7, 8, 1, 2][: len(s.context) - 11]
    s.check_integrity()


@pytest.mark.parametrize("status", [None, StepOk(tokens=(8, 1, 2))], ids=["skipped", "executed"])
def test_a_window_behind_a_wrong_one_is_stale_and_commits_nothing(status: StepOk | None) -> None:
    s, first, second = windows_in_flight()
    assert not s.is_stale(second)
    commit = complete(s, first, 4, 9, 6, 7)
    assert commit is not None
    assert (commit.tokens, s.epoch) == ((4, 9), 1)
    assert s.is_stale(second)
    again = dispatch(s) if s.wants_step else None
    assert s.complete(second, status, 2.0) is None
    again = again or dispatch(s)
    assert (again.epoch, getattr(again, "pos_start", 0)) == (1, 12)
    assert complete(s, again, 6) == Commit(7, (6,), chr(ord("a") + 9))
    s.check_integrity()


@pytest.mark.parametrize(
    ("predicted", "tokens", "reason"),
    [((4, END, 6, 7), (4,), "stop"), ((4, STOP, 6, 7), (4, STOP), "stop"), ((END, 5, 6, 7), (), "stop")],
)
def test_an_end_inside_a_window_ends_the_session_and_makes_the_rest_stale(
    predicted: tuple[int, ...], tokens: tuple[int, ...], reason: str
) -> None:
    s, first, second = windows_in_flight()
    commit = complete(s, first, *predicted)
    assert commit is not None
    assert (commit.tokens, commit.finish_reason, s.phase) == (tokens, reason, Phase.ENDED)
    assert s.epoch == 1, "stages may skip what is still on its way"
    assert complete(s, second, 8, 1, 2) is None
    assert s.next_step(100, 3.0) is None
    assert s.closing() == (StopStep(session=7),)


def test_max_tokens_inside_windows_are_kept() -> None:
    request = a_request([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 3, speculation=WINDOWS)
    s = Session(7, request, LetterText(), frozenset({END}), fixed(16))
    s.begin(OFF, 1.0)
    complete(s, dispatch(s), 3)
    while s.phase is not Phase.ENDED:
        step = dispatch(s)
        at = getattr(step, "pos_start", 0)
        complete(s, step, *[(position % 8) + 2 for position in range(at - 8, at - 8 + rows_of(step))])  # type: ignore[arg-type]
    assert (s.n_output, s.finish_reason) == (3, "length")
    s.check_integrity()


def test_after_the_end_nothing_is_committed() -> None:
    s = session(range(1, 21))
    first, second = dispatch(s), dispatch(s)
    s.end()
    assert s.next_step(100, 1.0) is None
    for step in (first, second):
        assert complete(s, step, 5) is None
    assert (s.n_output, s.finish_reason) == (0, "")
    s.check_integrity()


def test_a_count_above_the_limit_is_found() -> None:
    s = session(max_tokens=2)
    s.commit([1], 1.0)
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
        commit = s.commit(span, 1.0)
        got += commit.tokens
        text += commit.text
    assert (got, s.finish_reason) == (expected, reason)
    shown = "".join(chr(ord("a") + token % 26) for token in expected if token != STOP)
    assert text == (shown if reason else shown[:-1])
