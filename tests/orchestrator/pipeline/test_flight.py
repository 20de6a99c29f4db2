"""A frame's way over the stages: what each stage is sent, and what becomes of every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.frames import Frame
from skippy_orchestrator.pipeline.flight import Flight
from skippy_stage.errors import ErrorCode, ProtocolError
from skippy_stage.protocol import (
    DecodeStep,
    FrameResult,
    OpenStep,
    PrefillStep,
    ProbeStep,
    RecordStep,
    Restorable,
    RestoreStep,
    Step,
    StepFailed,
    StepOk,
    StepSkipped,
    StepStatus,
    StopStep,
    rows_of,
    tokens_of,
)

OPEN = OpenStep(session=1, max_tokens=9)
PREFILL = PrefillStep(session=1, epoch=0, pos_start=0, rows=3, lookahead=1)
DECODE = DecodeStep(session=2, epoch=0, pos_start=5)
LAST = PrefillStep(session=3, epoch=2, pos_start=4, rows=2, sample=True)
FRAME = Frame(
    8, (OPEN, PREFILL, DECODE, LAST), (10, 11, 12, 13, 20, 30, 31), ended=(77,), live_epochs=((3, 2),)
)
OK, SKIPPED = StepOk(), StepSkipped()


def failed(message: str) -> StepFailed:
    return StepFailed(code=ErrorCode.INTERNAL, message=message)


def result(*statuses: StepStatus, frame: int = 8) -> FrameResult:
    return FrameResult(incarnation=1, frame=frame, statuses=statuses)


def rows(count: int) -> np.ndarray:
    return np.zeros((count, 4), np.float32)


def test_the_first_stage_gets_everything() -> None:
    flight = Flight(FRAME, ["a", "b"])
    header = flight.header(1234, busy_stages=2)
    assert (header.incarnation, header.frame, header.busy_stages) == (1234, 8, 2)
    assert (header.steps, header.ended, header.live_epochs) == (FRAME.steps, (77,), ((3, 2),))
    assert flight.tokens().tolist() == list(FRAME.tokens)
    assert flight.tokens().dtype == np.int32
    assert flight.hidden is None
    assert not flight.done


def test_the_next_stage_gets_what_was_ok_and_the_failure_names_its_stage() -> None:
    flight = Flight(FRAME, ["a", "b", "c"])
    hidden = rows(3)
    flight.advance(result(OK, failed("out of luck"), OK, OK), hidden)
    assert flight.header(1, 1).steps == (OPEN, DECODE, LAST)
    assert flight.header(1, 1).ended == (77,)
    assert flight.tokens().tolist() == [20, 30, 31]
    assert flight.hidden is hidden
    flight.advance(result(OK, SKIPPED, OK), rows(2))
    assert flight.header(1, 1).steps == (OPEN, LAST)
    flight.advance(result(OK, StepOk(tokens=(5,))), None)
    assert flight.done
    assert flight.statuses == [OK, failed("a: out of luck"), SKIPPED, StepOk(tokens=(5,))]


def test_a_frame_without_steps_left_travels_on() -> None:
    flight = Flight(FRAME, ["a", "b"])
    flight.advance(result(SKIPPED, SKIPPED, failed("x"), SKIPPED), None)
    header = flight.header(1, 1)
    assert (header.frame, header.steps, header.ended) == (8, (), (77,))
    assert flight.tokens().tolist() == []
    flight.advance(result(), None)
    assert flight.statuses == [SKIPPED, SKIPPED, failed("a: x"), SKIPPED]


@pytest.mark.parametrize(
    ("answer", "hidden", "message"),
    [
        (result(OK, OK, OK), rows(6), "a: answered frame 8 with 3 statuses, expected frame 8 with 4"),
        (result(OK, OK, OK, OK, frame=9), rows(6), "a: answered frame 9 with 4 statuses, expected frame 8"),
        (result(OK, OK, OK, OK), rows(5), "a: answered with 5 hidden rows, expected 6"),
        (result(OK, OK, OK, OK), None, "a: answered with none hidden rows, expected 6"),
        (result(OK, OK, SKIPPED, OK), rows(6), "a: answered with 6 hidden rows, expected 5"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(
    answer: FrameResult, hidden: np.ndarray | None, message: str
) -> None:
    flight = Flight(FRAME, ["a", "b"])
    with pytest.raises(ProtocolError, match=message):
        flight.advance(answer, hidden)


PROBE = ProbeStep(session=4, epoch=0, length=3)
WITH_PROBE = Frame(8, (PROBE, DECODE), (40, 41, 42, 20), ended=())


def could(longest: int, *lengths: int) -> Restorable:
    return Restorable(longest, lengths or None)


@pytest.mark.parametrize(
    ("answers", "common"),
    [
        ([could(3), could(3), could(3)], could(3)),
        ([could(3), could(1), could(2)], could(1)),
        ([could(2), could(3), could(0)], could(0)),
        ([could(3), could(3, 1, 3), could(2)], could(1, 1)),
        ([could(3, 2, 3), could(3, 1, 2), could(3)], could(2, 2)),
        ([could(3, 3), could(2, 1, 2), could(3)], Restorable(0, ())),
    ],
)
def test_a_probe_is_answered_with_what_all_stages_have_in_common(
    answers: list[Restorable], common: Restorable
) -> None:
    flight = Flight(WITH_PROBE, ["a", "b", "c"])
    for stage, answer in enumerate(answers):
        assert flight.header(1, 1).steps == (PROBE, DECODE)
        assert flight.tokens().tolist() == [40, 41, 42, 20], "every stage is asked for the same tokens"
        last = stage == len(answers) - 1
        decoded = StepOk(tokens=(5,)) if last else OK
        flight.advance(result(StepOk(restorable=answer), decoded), None if last else rows(1))
    assert flight.done
    assert flight.statuses == [StepOk(restorable=common), StepOk(tokens=(5,))]


@pytest.mark.parametrize("order", [[3, 1, 2], [1, 3, 2], [2, 3, 1]])
def test_whichever_stage_has_least_decides(order: list[int]) -> None:
    flight = Flight(Frame(8, (PROBE,), (40, 41, 42), ended=()), ["a", "b", "c"])
    for longest in order:
        flight.advance(result(StepOk(restorable=could(longest))), None)
    assert flight.statuses == [StepOk(restorable=could(1))]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("outcome", [failed("no such lease"), SKIPPED])
def test_a_probe_that_a_stage_did_not_answer_has_no_answer(stage: int, outcome: StepStatus) -> None:
    stages = ["a", "b", "c"]
    flight = Flight(WITH_PROBE, stages)
    for index in range(3):
        probe: tuple[StepStatus, ...] = (StepOk(restorable=could(3)),)
        if index >= stage:
            probe = (outcome,) if index == stage else ()
        assert flight.header(1, 1).steps == ((PROBE, DECODE) if index <= stage else (DECODE,))
        assert flight.tokens().tolist() == ([40, 41, 42, 20] if index <= stage else [20])
        flight.advance(result(*probe, OK), None if index == 2 else rows(1))
    named = failed(f"{stages[stage]}: no such lease") if outcome != SKIPPED else SKIPPED
    assert flight.statuses == [named, OK]


def test_controls_travel_with_the_rows_of_their_session_and_have_no_rows() -> None:
    steps: tuple[Step, ...] = (
        RecordStep(session=9, epoch=0, length=7),
        StopStep(session=9),
        RestoreStep(session=2, epoch=0, length=5),
        DECODE,
        RecordStep(session=2, epoch=0, length=6),
    )
    flight = Flight(Frame(8, steps, (20,), ended=()), ["a", "b"])
    flight.advance(result(OK, OK, failed("not leased"), SKIPPED, SKIPPED), None)
    assert flight.header(1, 1).steps == steps[:2]
    flight.advance(result(OK, OK), None)
    assert flight.statuses == [OK, OK, failed("a: not leased"), SKIPPED, SKIPPED]


steps = st.one_of(
    st.builds(OpenStep, session=st.integers(1, 9), max_tokens=st.just(9)),
    st.builds(ProbeStep, session=st.integers(1, 9), epoch=st.just(0), length=st.integers(1, 4)),
    st.builds(StopStep, session=st.integers(1, 9)),
    st.builds(DecodeStep, session=st.integers(1, 9), epoch=st.just(0), pos_start=st.just(1)),
    st.builds(
        PrefillStep,
        session=st.integers(1, 9),
        epoch=st.just(0),
        pos_start=st.just(0),
        rows=st.integers(1, 4),
        lookahead=st.integers(0, 2),
    ),
)
outcomes = st.sampled_from(["ok", "ok", "failed", "skipped"])


@given(st.lists(st.tuples(steps, st.lists(outcomes, min_size=3, max_size=3)), max_size=8))
def test_every_stage_gets_the_steps_that_all_before_it_found_ok(
    plan: Sequence[tuple[Step, list[str]]],
) -> None:
    """Against a model that looks every step up by itself."""
    tokens: list[int] = []
    tokens_at = []
    for step, _ in plan:
        tokens_at.append(list(range(len(tokens), len(tokens) + tokens_of(step))))
        tokens += tokens_at[-1]
    stages = ["a", "b", "c"]
    flight = Flight(Frame(1, tuple(step for step, _ in plan), tuple(tokens), ended=()), stages)
    for stage, name in enumerate(stages):
        alive = [i for i, (_, fates) in enumerate(plan) if all(fate == "ok" for fate in fates[:stage])]
        assert flight.header(1, 1).steps == tuple(plan[i][0] for i in alive)
        assert flight.tokens().tolist() == [token for i in alive for token in tokens_at[i]]
        statuses: dict[str, StepStatus] = {"ok": OK, "failed": failed(name), "skipped": SKIPPED}
        left = sum(rows_of(plan[i][0]) for i in alive if plan[i][1][stage] == "ok")
        flight.advance(
            FrameResult(incarnation=1, frame=1, statuses=tuple(statuses[plan[i][1][stage]] for i in alive)),
            rows(left) if left and stage < 2 else None,
        )
    for (_, fates), status in zip(plan, flight.statuses, strict=True):
        first = next((i for i, fate in enumerate(fates) if fate != "ok"), None)
        if first is None:
            assert status == OK
        elif fates[first] == "failed":
            assert status == failed(f"{stages[first]}: {stages[first]}")
        else:
            assert status == SKIPPED
