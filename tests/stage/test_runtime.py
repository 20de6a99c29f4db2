"""The stage runtime on the scripted engine: order, alignment, isolation of failures, what is freed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from skippy_stage.engines.base import Batch
from skippy_stage.errors import ProtocolError, SkippyError
from skippy_stage.protocol import (
    DecodeStep,
    FrameHeader,
    OpenStep,
    PrefillStep,
    SamplingParams,
    Step,
    StepFailed,
    StepOk,
    StepSkipped,
    TrimStep,
    VerifyStep,
    rows_of,
)
from skippy_stage.runtime import StageRuntime

from tests.scripted import ScriptedEngine, reference


class Stage:
    """A single-stage runtime with a counter for frames."""

    def __init__(self, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine()
        self.runtime: StageRuntime[int] = StageRuntime(self.engine, "stage_0")
        self.number = 0

    def accept(
        self, *steps: Step, tokens: Sequence[int] = (), incarnation: int = 1, **header: object
    ) -> list[int]:
        self.number += 1
        frame = FrameHeader(incarnation=incarnation, frame=self.number, steps=steps, **header)  # type: ignore[arg-type]
        return self.runtime.accept(frame, np.array(tokens, np.int32), None, self.number)

    def execute(self) -> tuple[object, ...]:
        frame = self.runtime.take(timeout=0)
        assert frame is not None
        return self.runtime.execute(frame)[0].statuses

    def frame(self, *steps: Step, tokens: list[int] = [], **header: object) -> tuple[object, ...]:  # noqa: B006
        self.accept(*steps, tokens=tokens, **header)  # type: ignore[arg-type]
        return self.execute()


def opened(session: int = 1, room: int = 100) -> OpenStep:
    return OpenStep(session=session, max_tokens=room)


def prefill(session: int, start: int, rows: int, *, sample: bool = False, epoch: int = 0) -> PrefillStep:
    return PrefillStep(session=session, epoch=epoch, pos_start=start, rows=rows, sample=sample)


def decode(session: int, start: int, epoch: int = 0) -> DecodeStep:
    return DecodeStep(session=session, epoch=epoch, pos_start=start)


def test_prefill_then_decode_gives_the_reference() -> None:
    stage = Stage()
    prompt = [3, 1, 4, 1, 5]
    expected = reference(prompt, 3)
    statuses = stage.frame(opened(), prefill(1, 0, 5, sample=True), tokens=prompt)
    assert statuses == (StepOk(), StepOk(tokens=(expected[0],)))
    assert stage.frame(decode(1, 5), tokens=expected[:1]) == (StepOk(tokens=(expected[1],)),)
    assert stage.frame(decode(1, 6), tokens=expected[1:2]) == (StepOk(tokens=(expected[2],)),)
    stage.runtime.check_integrity()


def test_verify_window_predicts_at_every_row_and_a_rejection_is_cut_back() -> None:
    """D-29: after a rejected window the next step's position is authoritative on the stage."""
    stage = Stage()
    prompt = [3, 1, 4]
    expected = reference(prompt, 6)
    stage.frame(opened(), prefill(1, 0, 3, sample=True), tokens=prompt)
    drafts = [expected[0], expected[1], 99, 98]
    window = VerifyStep(session=1, epoch=0, pos_start=3, rows=4, window=1)
    (status,) = stage.frame(window, tokens=drafts)
    assert isinstance(status, StepOk)
    assert list(status.tokens[:2]) == expected[1:3]
    assert stage.engine.cached(1) == 7
    (status,) = stage.frame(decode(1, 5), tokens=[expected[2]])
    assert status == StepOk(tokens=(expected[3],))
    assert stage.engine.cached(1) == 6


def test_a_session_that_is_behind_fails_instead_of_running_with_a_gap() -> None:
    stage = Stage()
    stage.frame(opened(), prefill(1, 0, 2), tokens=[1, 2])
    (status,) = stage.frame(decode(1, 3), tokens=[9])
    assert isinstance(status, StepFailed)
    assert "behind: has 2 positions, the step starts at 3" in status.message


def test_after_a_failure_later_steps_of_the_epoch_are_skipped_and_a_new_epoch_runs() -> None:
    stage = Stage()
    stage.frame(opened(), prefill(1, 0, 2), tokens=[1, 2])
    stage.frame(decode(1, 5), tokens=[9])
    assert stage.frame(decode(1, 2), tokens=[3]) == (StepSkipped(),)
    (status,) = stage.frame(decode(1, 2, epoch=1), tokens=[3])
    assert isinstance(status, StepOk)


def test_room_of_a_session_is_a_limit() -> None:
    stage = Stage()
    stage.frame(opened(room=3), prefill(1, 0, 3), tokens=[1, 2, 3])
    (status,) = stage.frame(decode(1, 3), tokens=[4])
    assert isinstance(status, StepFailed)
    assert "room for 3" in status.message


def test_trim_cuts_without_rows() -> None:
    stage = Stage()
    stage.frame(opened(), prefill(1, 0, 4), tokens=[1, 2, 3, 4])
    assert stage.frame(TrimStep(session=1, epoch=0, length=2)) == (StepOk(),)
    (status,) = stage.frame(decode(1, 2), tokens=[9])
    assert status == StepOk(tokens=(reference([1, 2, 9], 1)[0],))


def test_unknown_session_and_double_open_fail_alone() -> None:
    stage = Stage()
    statuses = stage.frame(opened(), opened(), decode(7, 0), prefill(1, 0, 1, sample=True), tokens=[5, 6])
    assert [type(s) for s in statuses] == [StepOk, StepFailed, StepFailed, StepOk]
    assert statuses[3] == StepOk(tokens=tuple(reference([6], 1)))


def test_ended_sessions_skip_queued_work_and_are_freed_before_it_runs() -> None:
    stage = Stage()
    stage.frame(opened(1), prefill(1, 0, 2), opened(2), prefill(2, 0, 2), tokens=[1, 2, 3, 4])
    stage.accept(decode(1, 2), decode(2, 2), tokens=[5, 6])
    stage.accept(ended=(1,))
    statuses = stage.execute()
    assert statuses[0] == StepSkipped()
    assert isinstance(statuses[1], StepOk)
    assert set(stage.engine.usage().cached) == {2}, "freed at once, not when its own frame runs"
    assert stage.execute() == ()
    stage.runtime.check_integrity()


def test_an_open_whose_session_has_ended_meanwhile_does_not_leak() -> None:
    stage = Stage()
    stage.accept(opened(1), prefill(1, 0, 1), tokens=[1])
    stage.accept(ended=(1,))
    assert stage.execute() == (StepSkipped(), StepSkipped())
    stage.execute()
    assert stage.engine.usage().cached == {}


def test_lowest_live_epoch_applies_to_queued_frames() -> None:
    stage = Stage()
    stage.frame(opened(), prefill(1, 0, 2), tokens=[1, 2])
    stage.accept(decode(1, 2, epoch=0), tokens=[3])
    stage.accept(decode(1, 2, epoch=1), tokens=[4], live_epochs=((1, 1),))
    assert stage.execute() == (StepSkipped(),)
    (status,) = stage.execute()
    assert status == StepOk(tokens=tuple(reference([1, 2, 4], 1)))


def test_frames_must_come_in_number_order() -> None:
    stage = Stage()
    stage.frame(opened())
    stage.number += 1
    with pytest.raises(ProtocolError, match="gap in frames: got 3, expected 2"):
        stage.accept(decode(1, 0), tokens=[1])


def test_a_new_incarnation_drops_everything_and_late_frames_are_refused() -> None:
    stage = Stage()
    stage.frame(opened(), prefill(1, 0, 2), tokens=[1, 2])
    stage.accept(decode(1, 2), tokens=[3])
    stage.number = 0
    assert stage.accept(opened(5), prefill(5, 0, 1, sample=True), tokens=[9], incarnation=2) == [2]
    assert stage.execute()[1] == StepOk(tokens=tuple(reference([9], 1)))
    assert set(stage.engine.usage().cached) == {5}
    stage.number = 2
    with pytest.raises(ProtocolError, match="late frame 3 of incarnation 1"):
        stage.accept(decode(1, 3), tokens=[3], incarnation=1)
    stage.number = 4
    with pytest.raises(ProtocolError, match="frame 5 of a new incarnation, expected 1"):
        stage.accept(decode(1, 3), tokens=[3], incarnation=3)


def test_one_culprit_in_a_batch_fails_alone() -> None:
    engine = ScriptedEngine()

    def fault(batch: Batch) -> None:
        if any(rows.sequence == 2 for rows in batch.sequences):
            raise SkippyError("no")

    engine.fault = fault
    stage = Stage(engine)
    steps: list[Step] = []
    for session in (1, 2, 3):
        steps += [opened(session), prefill(session, 0, 2, sample=True)]
    statuses = stage.frame(*steps, tokens=[1, 2, 3, 4, 5, 6])
    assert statuses[1] == StepOk(tokens=tuple(reference([1, 2], 1)))
    assert isinstance(statuses[3], StepFailed)
    assert statuses[3].message == "no"
    assert statuses[5] == StepOk(tokens=tuple(reference([5, 6], 1)))


def test_hidden_rows_of_ok_steps_only_in_order() -> None:
    stage = Stage(ScriptedEngine(0, 3))
    frame = FrameHeader(
        incarnation=1,
        frame=1,
        steps=(opened(1), prefill(1, 0, 2), decode(9, 0), opened(2), prefill(2, 0, 1)),
    )
    stage.runtime.accept(frame, np.array([1, 2, 3, 4], np.int32), None, 0)
    queued = stage.runtime.take(timeout=0)
    assert queued is not None
    result, hidden = stage.runtime.execute(queued)
    assert hidden is not None
    assert len(hidden) == sum(
        rows_of(s)
        for s, status in zip(frame.steps, result.statuses, strict=True)
        if isinstance(status, StepOk)
    )
    alone = Stage(ScriptedEngine(0, 3))
    alone.runtime.accept(
        FrameHeader(incarnation=1, frame=1, steps=(opened(2), prefill(2, 0, 1))),
        np.array([4], np.int32),
        None,
        0,
    )
    queued = alone.runtime.take(timeout=0)
    assert queued is not None
    np.testing.assert_array_equal(hidden[2:], alone.runtime.execute(queued)[1])


@pytest.mark.parametrize(
    ("tokens", "hidden", "message"),
    [
        ([1], None, "token tensor of shape"),
        ([1, 251], None, "token id outside"),
        ([1, -1], None, "token id outside"),
        ([1, 2], np.zeros((2, 4), np.float32), "hidden rows sent to the first stage"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_without_effect(
    tokens: list[int], hidden: np.ndarray | None, message: str
) -> None:
    stage = Stage()
    header = FrameHeader(incarnation=1, frame=1, steps=(opened(), prefill(1, 0, 2)))
    with pytest.raises(ProtocolError, match=message):
        stage.runtime.accept(header, np.array(tokens, np.int32), hidden, 0)
    assert isinstance(stage.frame(opened(), prefill(1, 0, 2), tokens=[1, 2])[1], StepOk)


@pytest.mark.parametrize("hidden", [None, np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float16)])
def test_later_stages_check_hidden_rows(hidden: np.ndarray | None) -> None:
    runtime: StageRuntime[int] = StageRuntime(ScriptedEngine(3, 6), "stage_1", 1)
    header = FrameHeader(incarnation=1, frame=1, steps=(opened(), prefill(1, 0, 2)))
    with pytest.raises(ProtocolError, match="hidden rows"):
        runtime.accept(header, np.array([1, 2], np.int32), hidden, 0)


def test_sampling_of_a_session_is_its_own() -> None:
    stage = Stage()
    params = SamplingParams(temperature=0.9, seed=11, top_k=20)
    steps = (
        OpenStep(session=1, max_tokens=9, sampling=params),
        prefill(1, 0, 2, sample=True),
        opened(2),
        prefill(2, 0, 2, sample=True),
    )
    statuses = stage.frame(*steps, tokens=[1, 2, 1, 2])
    assert statuses[1] == StepOk(tokens=tuple(reference([1, 2], 1, params)))
    assert statuses[3] == StepOk(tokens=tuple(reference([1, 2], 1)))


def test_status_counts_and_integrity_names_what_is_wrong() -> None:
    stage = Stage()
    stage.frame(opened(), prefill(1, 0, 2), tokens=[1, 2])
    status = stage.runtime.status(check_integrity=True)
    assert (status.sessions, status.frames, status.rows, status.last_frame, status.integrity) == (
        1,
        1,
        2,
        1,
        "",
    )
    stage.engine.close(1)
    assert "runtime" in stage.runtime.status(check_integrity=True).integrity
