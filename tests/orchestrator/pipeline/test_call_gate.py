from __future__ import annotations

import threading
import time

import pytest
from skippy_orchestrator.pipeline.call_gate import CallGate
from skippy_stage.errors import StageFault

GENEROUS_S = 20.0


class Stage:
    def __init__(self, name: str) -> None:
        self.name = name
        self.gone = False

    def is_gone(self) -> bool:
        return self.gone


def start_call(gate: CallGate, stage: Stage) -> tuple[threading.Thread, threading.Event]:
    started = threading.Event()

    def call() -> None:
        with gate.call(stage):
            started.set()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, started


def test_calls_to_living_stages_run_side_by_side() -> None:
    gate, one, two = CallGate(), Stage("one"), Stage("two")
    with gate.call(one), gate.call(one), gate.call(two):
        thread, started = start_call(gate, two)
        assert started.wait(GENEROUS_S)
        thread.join(GENEROUS_S)


def test_a_stage_that_is_gone_is_not_called() -> None:
    gate, stage = CallGate(), Stage("one")
    stage.gone = True
    with pytest.raises(StageFault, match=r"^one: its process has ended"), gate.call(stage):
        raise AssertionError("the call was made")


def test_nothing_starts_until_the_calls_to_a_dead_stage_have_returned_and_settled() -> None:
    now = [100.0]
    gate = CallGate(clock=lambda: now[0])
    dead, other = Stage("dead"), Stage("other")
    with gate.call(dead):
        dead.gone = True
        thread, started = start_call(gate, other)
        time.sleep(0.1)
        assert not started.is_set()
        assert not gate.wait_settled(dead, -1.0)
    time.sleep(0.1)
    assert not started.is_set()
    now[0] += 1.0
    assert started.wait(GENEROUS_S)
    thread.join(GENEROUS_S)
    assert gate.wait_settled(dead, 0.0)


def test_a_call_that_fails_is_counted_out() -> None:
    gate, stage = CallGate(), Stage("one")
    with pytest.raises(OSError, match="broken"), gate.call(stage):
        raise OSError("broken")
    stage.gone = True
    assert gate.wait_settled(stage, 1.0)
