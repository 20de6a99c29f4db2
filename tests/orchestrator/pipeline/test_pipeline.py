"""All links together: events in order, one failure, deadlines."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from skippy_orchestrator.frames import Frame, StageReport
from skippy_orchestrator.pipeline.local import LocalTransport
from skippy_orchestrator.pipeline.pipeline import (
    FrameDone,
    FrameLeftStage,
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


def left(number: int, stage: int = 0) -> FrameLeftStage:
    return FrameLeftStage(77, number, stage, StageReport(sent_bytes=HIDDEN.nbytes if stage else 0))


def done(number: int, stages: int = 2) -> FrameDone:
    report = StageReport(sent_bytes=HIDDEN.nbytes if stages > 1 else 0)
    return FrameDone(77, number, [StepOk()], report)


def test_a_frame_leaves_every_stage_but_the_last_and_is_then_done() -> None:
    rig = Rig(3)
    rig.submit(1)
    rig.pass_on(0)
    rig.wait_for(left(1))
    rig.pass_on(1)
    rig.wait_for(left(1), left(1, stage=1))
    rig.pass_on(2)
    rig.wait_for(left(1), left(1, stage=1), done(1))
    rig.close()


def test_with_one_stage_a_frame_is_only_done() -> None:
    rig = Rig(1)
    rig.submit(1)
    rig.pass_on(0)
    rig.wait_for(done(1, stages=1))
    rig.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_report_says_what_every_stage_took_and_was_sent(depth: int) -> None:
    rig = Rig(3, depth)
    rig.submit(1)
    at_first = rig.transports[0].next()
    rig.now += 0.010
    at_first.answer(HIDDEN, rows=7, compute_us=6000, queue_us=1500)
    at_second = rig.transports[1].next()
    rig.now += 0.003
    at_second.answer(np.zeros((1, 4), np.float64), rows=5, compute_us=2000)
    at_last = rig.transports[2].next()
    rig.now += 0.5
    at_last.answer(rows=4, compute_us=10, queue_us=20)
    first = StageReport(rows=7, compute_us=6000, queue_us=1500, call_us=10_000)
    second = StageReport(rows=5, compute_us=2000, call_us=3000, sent_bytes=16)
    last = StageReport(rows=4, compute_us=10, queue_us=20, call_us=500_000, sent_bytes=32)
    rig.wait_for(
        FrameLeftStage(77, 1, 0, first), FrameLeftStage(77, 1, 1, second), FrameDone(77, 1, [StepOk()], last)
    )
    assert [report.write_us for report in (first, second, last)] == [2500, 1000, 499_970]
    rig.close()


def test_the_wait_for_a_place_at_a_stage_is_in_no_report() -> None:
    rig = Rig(2, depth=1)
    rig.submit(1, 2)
    first = rig.transports[0].next()
    rig.now = 4.0
    first.answer(HIDDEN)
    second, at_last = rig.transports[0].next(), rig.transports[1].next()
    rig.now = 5.0
    second.answer(HIDDEN)
    wait_until(lambda: len(rig.events) == 2)
    rig.now = 9.0
    at_last.answer()
    at_last = rig.transports[1].next()
    rig.now = 11.0
    at_last.answer()
    wait_until(lambda: len(rig.events) == 4)
    reports = [event.report for event in rig.events if not isinstance(event, PipelineFailed)]
    assert [report.call_us / 1e6 for report in reports] == [4.0, 1.0, 5.0, 2.0]
    rig.close()


def test_no_time_is_below_nothing() -> None:
    """Clocks of two processes need not agree to the microsecond."""
    assert StageReport(compute_us=900, queue_us=200, call_us=1000).write_us == 0


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
    way: dict[int, list[int]] = {number: [] for number in range(1, 31)}
    for event in events:
        assert not isinstance(event, PipelineFailed)
        stage = event.stage if isinstance(event, FrameLeftStage) else stages - 1
        way[event.number].append(stage)
        assert event.report.rows == 3
        assert event.report.sent_bytes == (3 * 4 * 4 if stage else 0)
        assert event.report.call_us >= 0
        if isinstance(event, FrameDone):
            expected = tuple(reference([event.number, 2, 3], 1))
            assert list(event.statuses) == [StepOk(), StepOk(tokens=expected)]
    assert all(way[number] == list(range(stages)) for number in way)
    for stage in range(stages - 1):
        left_it = [e.number for e in events if isinstance(e, FrameLeftStage) and e.stage == stage]
        assert left_it == list(range(1, 31))
    assert [e.number for e in events if isinstance(e, FrameDone)] == list(range(1, 31))
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
