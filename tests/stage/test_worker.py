from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
from skippy_stage.engines.base import KvUsage
from skippy_stage.protocol import FrameHeader, FrameResult
from skippy_stage.runtime import StageRuntime
from skippy_stage.worker import StageWorker

from tests.scripted import ScriptedEngine

GENEROUS_S = 20.0
NO_TOKENS = np.empty(0, np.int32)


def frame(number: int) -> FrameHeader:
    return FrameHeader(incarnation=1, frame=number)


def test_loads_and_answers_in_its_own_thread() -> None:
    threads: list[threading.Thread] = []
    answers: queue.SimpleQueue[tuple[int, FrameResult]] = queue.SimpleQueue()

    def load() -> StageRuntime[int]:
        threads.append(threading.current_thread())
        return StageRuntime(ScriptedEngine(), "stage_0")

    def respond(reply: int, result: FrameResult, hidden: object) -> None:
        threads.append(threading.current_thread())
        answers.put((reply, result))
        raise OSError("nobody listens")

    worker: StageWorker[int] = StageWorker(load, respond, "stage_0")
    runtime = worker.start()
    for number in (1, 2):
        runtime.accept(frame(number), NO_TOKENS, None, number)
        reply, result = answers.get(timeout=GENEROUS_S)
        assert (reply, result.frame) == (number, number)
    assert worker.stop(GENEROUS_S)
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_what_loading_raises_is_raised_by_start() -> None:
    def load() -> StageRuntime[int]:
        raise ValueError("no such model")

    worker: StageWorker[int] = StageWorker(load, lambda *_: None, "stage_0")
    with pytest.raises(ValueError, match="no such model"):
        worker.start()
    assert worker.stop(GENEROUS_S)


def test_a_runtime_that_fails_is_told_and_nothing_more_is_run() -> None:
    class Broken(ScriptedEngine):
        def usage(self) -> KvUsage:
            raise RuntimeError("a bug")

    crashed = threading.Event()
    worker: StageWorker[int] = StageWorker(
        lambda: StageRuntime(Broken(), "stage_0"), lambda *_: None, "stage_0", on_crash=crashed.set
    )
    runtime = worker.start()
    runtime.accept(frame(1), NO_TOKENS, None, 1)
    assert crashed.wait(GENEROUS_S)
    assert worker.stop(GENEROUS_S)
