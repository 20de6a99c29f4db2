"""All links together: events in order, one failure, deadlines."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from skippy_orchestrator.core import Frame
from skippy_orchestrator.pipeline.local import LocalTransport
from skippy_orchestrator.pipeline.pipeline import (
    FrameDone,
    FrameLeftFirstStage,
    Pipeline,
    PipelineEvent,
    PipelineFailed,
)
from skippy_stage.errors import StageFault
from skippy_stage.protocol import OpenStep, PrefillStep, StepOk
from skippy_stage.runtime import StageRuntime

from tests.orchestrator.pipeline.manual import GENEROUS_S, ManualTransport, a_frame, wait_until
from tests.scripted import cut, reference

HIDDEN = np.zeros((1, 4), np.float32)


class Rig:
    def __init__(self, stages: int = 2, depth: int = 2) -> None:
        self.now = 0.0
        self.transports = [ManualTransport(f"stage_{i}") for i in range(stages)]
        self.events: list[PipelineEvent] = []
        self.pipeline = Pipeline(self.transports, 77, depth, self.events.append, clock=lambda: self.now)

    def submit(self, *numbers: int) -> None:
        for number in numbers:
            self.pipeline.submit(a_frame(number))

    def pass_on(self, stage: int) -> None:
        last = stage == len(self.transports) - 1
        self.transports[stage].next().answer(None if last else HIDDEN)

    def wait_for(self, *events: PipelineEvent) -> None:
        wait_until(lambda: len(self.events) >= len(events))
        assert self.events == list(events)

    def close(self) -> None:
        assert self.pipeline.stop(GENEROUS_S)


def left(number: int) -> FrameLeftFirstStage:
    return FrameLeftFirstStage(77, number)


def done(number: int) -> FrameDone:
    return FrameDone(77, number, [StepOk()])


def test_a_frame_leaves_the_first_stage_and_is_done_after_the_last() -> None:
    rig = Rig(3)
    rig.submit(1)
    rig.pass_on(0)
    rig.wait_for(left(1))
    rig.pass_on(1)
    rig.pass_on(2)
    rig.wait_for(left(1), done(1))
    rig.close()


def test_with_one_stage_a_frame_leaves_the_first_stage_before_it_is_done() -> None:
    rig = Rig(1)
    rig.submit(1)
    rig.pass_on(0)
    rig.wait_for(left(1), done(1))
    rig.close()


def test_stages_work_on_different_frames_and_know_how_many_are_busy() -> None:
    rig = Rig(2)
    rig.submit(1, 2)
    first = rig.transports[0].next()
    first.answer(HIDDEN)
    at_last_stage, at_first_stage = rig.transports[1].next(), rig.transports[0].next()
    assert (at_last_stage.header.frame, at_first_stage.header.frame) == (1, 2)
    assert at_last_stage.header.incarnation == at_first_stage.header.incarnation == 77
    assert at_last_stage.header.busy_stages == 2
    assert at_last_stage.hidden is HIDDEN
    at_last_stage.answer()
    rig.wait_for(left(1), done(1))
    at_first_stage.answer(HIDDEN)
    alone = rig.transports[1].next()
    assert alone.header.busy_stages == 1
    alone.answer()
    rig.wait_for(left(1), done(1), left(2), done(2))
    rig.close()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_real_stages_complete_frames_in_order(stages: int) -> None:
    transports = [
        LocalTransport(f"stage_{i}", StageRuntime(engine, f"stage_{i}", i))
        for i, engine in enumerate(cut(stages))
    ]
    events: list[PipelineEvent] = []
    pipeline = Pipeline(transports, 5, 2, events.append)
    for number in range(1, 31):
        prompt = (number, 2, 3)
        steps = (
            OpenStep(session=number, max_tokens=3),
            PrefillStep(session=number, epoch=0, pos_start=0, rows=3, sample=True),
        )
        pipeline.submit(Frame(number, steps, prompt, ended=(number - 3,)))
    wait_until(lambda: sum(isinstance(event, FrameDone) for event in events) == 30)
    for kind in (FrameLeftFirstStage, FrameDone):
        assert [e.number for e in events if isinstance(e, kind)] == list(range(1, 31))
    for event in events:
        if isinstance(event, FrameDone):
            expected = tuple(reference([event.number, 2, 3], 1))
            assert list(event.statuses) == [StepOk(), StepOk(tokens=expected)]
            assert events.index(FrameLeftFirstStage(5, event.number)) < events.index(event)
    assert pipeline.stop(GENEROUS_S)
    for transport in transports:
        transport.close()


def test_the_first_failure_ends_the_pipeline_and_is_the_last_event() -> None:
    rig = Rig(3)
    rig.submit(1, 2)
    rig.pass_on(0)
    at_first, at_second = rig.transports[0].next(), rig.transports[1].next()
    at_second.fail(StageFault("stage_1", "broke"))
    failure = PipelineFailed(77, "stage_1", "broke")
    rig.wait_for(left(1), failure)
    at_first.fail(StageFault("stage_0", "broke as well"))
    rig.pipeline.fail("stage_2", "is gone")
    rig.pipeline.check_deadlines(1e9, 1.0)
    rig.submit(3)
    rig.close()
    assert rig.events == [left(1), failure]


def test_an_answer_that_does_not_fit_is_a_failure_of_its_stage() -> None:
    rig = Rig(2)
    rig.submit(1)
    rig.transports[0].next().answer(None)
    rig.wait_for(PipelineFailed(77, "stage_0", "answered with none hidden rows, expected 1"))
    rig.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_deadline_names_the_stage_that_has_the_frame(stage: int) -> None:
    rig = Rig(2)
    rig.submit(1)
    if stage:
        rig.now = 50.0
        rig.pass_on(0)
    pending = rig.transports[stage].next()
    rig.pipeline.check_deadlines(rig.now + 10.0, 10.0)
    assert rig.events == [left(1)][:stage]
    rig.pipeline.check_deadlines(rig.now + 10.1, 10.0)
    assert rig.events[stage:] == [PipelineFailed(77, f"stage_{stage}", "no answer within 10 s")]
    assert not rig.pipeline.stop(0.0), "the call has not returned"
    pending.answer()
    rig.close()


def test_after_stop_there_are_no_events() -> None:
    rig = Rig(2)
    rig.submit(1, 2)
    first, second = rig.transports[0].next(), rig.transports[0].next()
    rig.pipeline.stop(0.0)
    first.answer(HIDDEN)
    second.fail(StageFault("stage_0", "too late"))
    rig.pipeline.fail("stage_1", "is gone")
    rig.close()
    assert rig.events == []


def test_no_event_overtakes_a_failure_that_is_being_reported() -> None:
    reporting, go_on = threading.Event(), threading.Event()
    events: list[PipelineEvent] = []

    def slowly(event: PipelineEvent) -> None:
        if isinstance(event, PipelineFailed):
            reporting.set()
            go_on.wait(GENEROUS_S)
        events.append(event)

    transport = ManualTransport()
    pipeline = Pipeline([transport], 1, 2, slowly)
    pipeline.submit(a_frame(1))
    pending = transport.next()
    failing = threading.Thread(target=pipeline.fail, args=("stage_0", "is gone"))
    failing.start()
    assert reporting.wait(GENEROUS_S)
    pending.answer()
    go_on.set()
    failing.join()
    assert pipeline.stop(GENEROUS_S)
    assert events == [PipelineFailed(1, "stage_0", "is gone")]
