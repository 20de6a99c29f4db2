"""A session and the prefix caches: it asks, restores what all stages have, and records what it computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from skippy_orchestrator.deployment.speculation import NgramSection, SpeculationPlan
from skippy_orchestrator.prefix.outcome import CLOSED, CacheStatus, HitKind
from skippy_orchestrator.prefix.session import PrefixTerms
from skippy_orchestrator.sessions import Commit, Dispatched, Phase, Session, SessionStep
from skippy_stage.protocol import (
    DecodeStep,
    OpenStep,
    PrefillStep,
    ProbeStep,
    RecordStep,
    Restorable,
    RestoreStep,
    StepOk,
    StopStep,
    VerifyStep,
)

from tests.orchestrator.making import a_request, fixed, probing
from tests.orchestrator.simulation import TokenText

PROMPT = list(range(1, 21))
STOP = StopStep(session=7)


def session(terms: PrefixTerms, prompt: Sequence[int] = PROMPT, max_tokens: int = 12) -> Session:
    s = Session(7, a_request(prompt, max_tokens), TokenText(), frozenset({250}), fixed(8, credits=9))
    s.begin(terms, 1.0)
    return s


def record(length: int) -> RecordStep:
    return RecordStep(session=7, epoch=0, length=length)


def ask(s: Session) -> ProbeStep:
    step = s.next_step(0, 1.0)
    assert isinstance(step, ProbeStep)
    s.dispatch(step, 1.0)
    return step


def asked(terms: PrefixTerms, restorable: Restorable, **options: int) -> tuple[Session, Commit | None]:
    """A session whose stages have answered."""
    s = session(terms, **options)  # type: ignore[arg-type]
    commit = s.complete(ask(s), StepOk(restorable=restorable), 1.5)
    s.check_integrity()
    return s, commit


def send(s: Session, room: int = 100) -> tuple[SessionStep, Dispatched]:
    step = s.next_step(room, 2.0)
    assert step is not None
    return step, s.dispatch(step, 2.0)


def finish(s: Session, step: SessionStep, *tokens: int, now: float = 2.0) -> Commit | None:
    if isinstance(step, PrefillStep) and s.prefill is not None:
        s.prefill.left_first_stage(step.rows, 1.0, 0.0)
        s.credit_returned(now)
    return s.complete(step, StepOk(tokens=tokens), now)


def test_it_asks_first_with_its_prompt_and_waits_for_the_answer() -> None:
    s = session(probing())
    assert s.phase is Phase.PROBE
    step = s.next_step(0, 1.0)
    assert step == ProbeStep(session=7, epoch=0, length=20), "a question needs no room"
    opening = OpenStep(session=7, max_tokens=32, namespace="room")
    assert s.dispatch(step, 1.0) == Dispatched((opening,), PROMPT, ())
    assert (s.steps_in_flight, s.on_stages) == (1, True)
    assert s.next_step(100, 1.0) is None
    s.check_integrity()


def test_known_output_is_asked_for_behind_the_prompt_but_for_its_last_token() -> None:
    s = session(probing(30, 31, 32))
    step = s.next_step(0, 1.0)
    assert step == ProbeStep(session=7, epoch=0, length=22)
    assert list(s.dispatch(step, 1.0).tokens) == [*PROMPT, 30, 31]


def test_a_miss_computes_the_prompt_and_restores_nothing() -> None:
    s, commit = asked(probing(), Restorable(0))
    assert (commit, s.phase) == (None, Phase.PREFILL)
    step, sent = send(s)
    assert step == PrefillStep(session=7, epoch=0, pos_start=0, rows=8)
    assert sent.before == ()


@pytest.mark.parametrize(("could", "start", "rows"), [(5, 5, [8, 7]), (19, 19, [1]), (20, 19, [1])])
def test_a_part_is_restored_once_and_the_rest_computed(could: int, start: int, rows: list[int]) -> None:
    s, commit = asked(probing(), Restorable(could))
    assert (commit, s.phase) == (None, Phase.PREFILL)
    step, sent = send(s)
    assert step == PrefillStep(session=7, epoch=0, pos_start=start, rows=rows[0], sample=len(rows) == 1)
    assert sent.before == (RestoreStep(session=7, epoch=0, length=start),), "it rides with the first rows"
    assert list(sent.tokens) == PROMPT[start : start + rows[0]]
    for count in rows[1:]:
        step, sent = send(s)
        assert isinstance(step, PrefillStep)
        assert (step.rows, sent.before) == (count, ())
    assert s.phase is Phase.DECODE


def test_what_is_shorter_than_the_least_is_not_restored() -> None:
    s, _ = asked(probing(min_tokens=6), Restorable(5))
    step, sent = send(s)
    assert (step, sent.before) == (PrefillStep(session=7, epoch=0, pos_start=0, rows=8), ())


def test_replayed_tokens_are_committed_at_once_and_decoding_goes_on_behind_them() -> None:
    s, commit = asked(probing(30, 31, 32), Restorable(22))
    assert commit == Commit(7, (30, 31, 32), "".join(chr(0x100 + i) for i in (30, 31, 32)))
    assert (s.phase, s.prefill, s.n_output, s.predicted) == (Phase.DECODE, None, 3, [30, 31, 32])
    step, sent = send(s)
    assert step == DecodeStep(session=7, epoch=0, pos_start=22)
    restore = RestoreStep(session=7, epoch=0, length=22)
    assert sent == Dispatched((restore,), (32,), ())
    assert finish(s, step, 33) == Commit(7, (33,), chr(0x100 + 33))
    step, sent = send(s)
    assert (step, sent.before) == (DecodeStep(session=7, epoch=0, pos_start=23), ())


def test_of_known_tokens_only_those_count_whose_positions_are_there() -> None:
    s, commit = asked(probing(30, 31, 32), Restorable(20))
    assert commit is not None
    assert commit.tokens == (30,)
    step, sent = send(s)
    assert step == DecodeStep(session=7, epoch=0, pos_start=20)
    assert sent.before == (RestoreStep(session=7, epoch=0, length=20),)


@pytest.mark.parametrize(
    ("outputs", "max_tokens", "tokens", "reason"),
    [((30, 31), 2, (30, 31), "length"), ((30, 250), 9, (30,), "stop"), ((250,), 9, (), "stop")],
)
def test_a_session_may_end_with_what_it_replays(
    outputs: tuple[int, ...], max_tokens: int, tokens: tuple[int, ...], reason: str
) -> None:
    s, commit = asked(probing(*outputs), Restorable(22), max_tokens=max_tokens)
    assert commit is not None
    assert commit.cache is not None
    assert (commit.tokens, commit.finish_reason, s.phase) == (tokens, reason, Phase.ENDED)
    assert commit.cache.status is CacheStatus.HIT
    assert s.next_step(100, 2.0) is None
    assert s.closing() == (STOP,), "nothing was computed, so nothing is new"


def test_the_record_of_a_hit_names_its_kind_and_its_times() -> None:
    s, _ = asked(probing(), Restorable(12))
    first, _ = send(s)
    commit = finish(s, first, 40, now=1.75)
    assert commit is not None
    last = s.commit([250], 2.0)
    assert last.cache is not None
    cache = last.cache
    assert (cache.status, cache.hit_kind) == (CacheStatus.HIT, HitKind.PREFIX)
    assert (cache.cached_prompt_tokens, cache.restored_tokens, cache.suffix_prefill_tokens) == (12, 12, 7)
    assert (cache.restore_ms, cache.prompt_ms, cache.predicted_ms) == (500.0, 750.0, 250.0)
    assert (cache.hit_stage_count, cache.stage0_bytes_avoided) == (2, 12 * 4 * 4)


def test_a_probe_without_an_answer_is_a_fault() -> None:
    s = session(probing())
    with pytest.raises(ValueError, match="session 7: a probe without an answer"):
        s.complete(ask(s), StepOk(), 1.5)


def test_an_answer_after_the_end_changes_nothing() -> None:
    s = session(probing(30, 31))
    step = ask(s)
    s.end()
    assert s.complete(step, StepOk(restorable=Restorable(21)), 1.5) is None
    assert (s.n_output, s.phase, s.prefix.plan.length) == (0, Phase.ENDED, 0)


# Records.


def test_the_first_chunk_and_the_whole_prompt_are_recorded_and_the_answer_at_the_end() -> None:
    s = session(probing(probes=False))
    after = []
    steps = []
    while s.phase is Phase.PREFILL:
        step, sent = send(s)
        steps.append(step)
        after.append(sent.after)
    assert after == [(record(8),), (), (record(20),)]
    for step in steps[:-1]:
        assert finish(s, step) is None
    finish(s, steps[-1], 40)
    step, sent = send(s)
    assert sent.after == ()
    finish(s, step, 250)
    assert s.closing() == (record(21), STOP), "positions 0 to 20 were computed, all of them committed"
    s.check_integrity()


@pytest.mark.parametrize(
    ("terms", "records", "last"),
    [
        (probing(probes=False, record_output=False), [(record(8),), (record(20),)], ()),
        (probing(probes=False, min_tokens=9), [(), (record(20),)], (record(21),)),
        (probing(probes=False, min_tokens=21), [(), ()], (record(21),)),
        (probing(probes=False, min_tokens=22), [(), ()], ()),
        (probing(probes=False, records=False), [(), ()], ()),
        (probing(probes=False, lookup=CLOSED), [(record(8),), (record(20),)], (record(21),)),
    ],
)
def test_what_is_not_worth_keeping_is_not_recorded(
    terms: PrefixTerms, records: list[tuple[RecordStep, ...]], last: tuple[RecordStep, ...]
) -> None:
    s = session(terms)
    sent = []
    while s.phase is Phase.PREFILL:
        step, dispatched = send(s)
        sent.append(dispatched.after)
        finish(s, step, *([40] if s.phase is Phase.DECODE else []))
    assert [sent[0], sent[-1]] == records
    step, _ = send(s)
    finish(s, step, 250)
    assert s.closing() == (*last, STOP)


def test_what_was_restored_is_not_recorded_again() -> None:
    s, _ = asked(probing(), Restorable(10))
    first, sent = send(s)
    assert sent.after == ()
    second, sent = send(s)
    assert sent.after == (record(20),)
    finish(s, first)
    finish(s, second, 250)
    assert s.closing() == (STOP,), "the prompt is recorded, and there is no answer behind it"


def test_exact_states_are_recorded_where_they_can_be_used_again() -> None:
    """Chunks end at the shared checkpoint and before the last token, and nowhere else is anything recorded."""
    terms = probing(probes=False, exact=True, min_tokens=4, stride_tokens=4, record_limit=2)
    s = session(terms)
    ends = {}
    while s.phase is Phase.PREFILL:
        step, sent = send(s)
        assert isinstance(step, PrefillStep)
        ends[step.pos_start + step.rows] = sent.after
        finish(s, step, *([40] if s.phase is Phase.DECODE else []))
    assert ends[19] == (record(19),), "where the same prompt finds it"
    assert 20 in ends
    for end, after in ends.items():
        assert after in ((), (record(end),))
    assert ends[12] == (record(12),), "19 tokens on a grid of 4, and one stride below"


def test_exact_states_leave_the_answer_out_where_that_is_asked_for() -> None:
    terms = probing(probes=False, exact=True, min_tokens=4, stride_tokens=4, record_output=False)
    s = session(terms, PROMPT[:3])
    step, sent = send(s)
    assert sent.after == ()
    finish(s, step)
    step, sent = send(s)
    assert sent.after == (), "3 tokens are too few"
    finish(s, step, 40)
    step, _ = send(s)
    finish(s, step, 250)
    assert s.closing() == (STOP,)


NGRAMS = SpeculationPlan(
    ngram=NgramSection(kind="suffix", min_ngram=3, max_ngram=8, max_proposal_tokens=8), speculative_window=2
)
AGAIN = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


@pytest.mark.parametrize(
    ("could", "switch", "speculates"),
    [(0, False, True), (5, False, True), (9, False, False), (9, True, True), (10, False, False)],
)
def test_after_a_whole_restore_ngrams_are_asked_where_the_switch_says_so(
    could: int, switch: bool, speculates: bool
) -> None:
    """Spec 4.11 takes them away; row 19 of 13.3 lets them stay, which is the default."""
    s = Session(7, a_request(AGAIN, 12, speculation=NGRAMS), TokenText(), frozenset(), fixed(16))
    s.begin(probing(speculate_after_restore=switch), 1.0)
    s.complete(ask(s), StepOk(restorable=Restorable(could)), 1.5)
    while s.phase is Phase.PREFILL:
        step, _ = send(s)
        finish(s, step, 3)
    assert s.prefix.keeps_ngrams is speculates
    assert isinstance(send(s)[0], VerifyStep) is speculates
    s.check_integrity()


def test_states_that_cannot_be_cut_are_never_guessed_ahead_of() -> None:
    s = Session(7, a_request(AGAIN, 12, speculation=NGRAMS), TokenText(), frozenset(), fixed(16))
    s.begin(probing(exact=True), 1.0)
    s.complete(ask(s), StepOk(restorable=Restorable(0)), 1.5)
    while s.phase is Phase.PREFILL:
        step, _ = send(s)
        finish(s, step, 3)
    assert not s.prefix.cuts
    assert isinstance(send(s)[0], DecodeStep)
