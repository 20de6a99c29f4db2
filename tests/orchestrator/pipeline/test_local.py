"""Stages in this process, as the pipeline sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from skippy_orchestrator.pipeline.local import LocalPending, LocalTransport
from skippy_stage.engines.base import Batch
from skippy_stage.errors import ProtocolError, SkippyError
from skippy_stage.protocol import DecodeStep, FrameHeader, OpenStep, PrefillStep, StepOk
from skippy_stage.runtime import StageRuntime

from tests.orchestrator.pipeline.manual import GENEROUS_S
from tests.scripted import LAYERS, ScriptedEngine, reference

PROMPT = [3, 1, 4]


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    engine = ScriptedEngine()
    transport = LocalTransport("stage_0", StageRuntime(engine, "stage_0"))
    yield transport
    transport.close()
    assert "stage_0-worker" not in {thread.name for thread in threading.enumerate()}


def send_prompt(transport: LocalTransport, incarnation: int = 1, frame: int = 1) -> LocalPending:
    steps = (
        OpenStep(session=1, max_tokens=9),
        PrefillStep(session=1, epoch=0, pos_start=0, rows=3, sample=True),
    )
    header = FrameHeader(incarnation=incarnation, frame=frame, steps=steps)
    return transport.send(header, np.array(PROMPT, np.int32), None)


def test_frames_are_executed_in_order(transport: LocalTransport) -> None:
    first, second = reference(PROMPT, 2)
    pending = send_prompt(transport)
    header = FrameHeader(incarnation=1, frame=2, steps=(DecodeStep(session=1, epoch=0, pos_start=3),))
    later = transport.send(header, np.array([first], np.int32), None)
    assert later.wait()[0].statuses == (StepOk(tokens=(second,)),)
    result, hidden = pending.wait()
    assert (result.frame, result.statuses, hidden) == (1, (StepOk(), StepOk(tokens=(first,))), None)


def test_who_it_is_and_that_it_cannot_be_revived(transport: LocalTransport) -> None:
    send_prompt(transport).wait()
    status = transport.status(check_integrity=True)
    assert (status.name, status.first_layer, status.last_layer, status.frames) == ("stage_0", 0, LAYERS, 1)
    assert status.integrity == ""
    assert not transport.is_gone()
    with pytest.raises(SkippyError, match="stage_0: is part of this process"):
        transport.revive()


def test_a_frame_that_breaks_the_protocol_is_refused_when_it_is_sent(transport: LocalTransport) -> None:
    with pytest.raises(ProtocolError, match="expected 1"):
        send_prompt(transport, frame=2)
    with pytest.raises(ProtocolError, match="frame number 0"):
        send_prompt(transport, frame=0)
    assert transport.status().last_frame == 0


def test_frames_of_a_pipeline_that_was_replaced_end_with_an_error(transport: LocalTransport) -> None:
    running, go_on = threading.Event(), threading.Event()

    def fault(batch: Batch) -> None:
        running.set()
        go_on.wait()

    transport.runtime._engine.fault = fault  # type: ignore[attr-defined]
    at_work = send_prompt(transport)
    assert running.wait(GENEROUS_S)
    header = FrameHeader(incarnation=1, frame=2, steps=(DecodeStep(session=1, epoch=0, pos_start=3),))
    queued = transport.send(header, np.array([7], np.int32), None)
    fresh = send_prompt(transport, incarnation=2)
    with pytest.raises(SkippyError, match="started anew"):
        queued.wait()
    go_on.set()
    assert at_work.wait()[0].incarnation == 1
    result, _ = fresh.wait()
    assert (result.incarnation, result.statuses[1]) == (2, StepOk(tokens=tuple(reference(PROMPT, 1))))
