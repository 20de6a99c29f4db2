"""The service when a stage breaks or its own core does: everybody is answered once, then it serves again."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from skippy_orchestrator.core import Core
from skippy_orchestrator.deployment import SchedulerSection
from skippy_stage.engines.base import Batch

from tests.orchestrator.faulty_stage import FaultyStage
from tests.orchestrator.serving import Client, Serving, serving, wait_until
from tests.scripted import reference

ONE_GROUP = SchedulerSection(max_sessions=3, min_group_rows=3)


def start_streams(s: Serving, count: int = 4) -> list[Client]:
    """Some requests, three of which run; with ONE_GROUP all of them are in one frame from now on."""
    clients = [s.submit([1, i], 50_000, stream=bool(i % 2)) for i in range(count)]

    def decoding() -> bool:
        cached = s.stages[-1].cached()
        return len(cached) >= 3 and min(cached) > 3

    wait_until(decoding, "all streams run")
    return clients


def refuse(stage: FaultyStage) -> None:
    stage.broken = "connection refused"


def die(stage: FaultyStage) -> None:
    stage.gone = True


def hang(stage: FaultyStage) -> None:
    stage.hang()


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        (refuse, "connection refused", "connection refused"),
        (die, "its process has ended.*", "its process has ended, it is being loaded again"),
        (hang, "no answer within 100 s", "is still busy with a frame of the last pipeline"),
    ],
    ids=["refuses", "dies", "hangs"],
)
def test_a_lost_stage_ends_all_requests_and_is_waited_for(
    index: int, fault: Callable[[FaultyStage], None], error: str, reason: str
) -> None:
    with serving(3, limits={"frame_deadline_s": 100.0}, scheduler=ONE_GROUP) as s:
        clients = start_streams(s)
        before = s.service.status()["incarnation"]
        stage = s.stages[index]
        fault(stage)
        if fault is hang:
            stage.engine_is_stuck.wait()
            s.let_pass(101.0)
        for client in clients[:3]:
            assert_matches(client.finish(), f"INTERNAL: {stage.name}: {error}")
        assert_matches(clients[3].finish(), f"UNAVAILABLE: lost {stage.name}: {error}")
        wait_until(lambda: s.service.status()["reason"] == f"{stage.name}: {reason}", "the reason is known")
        assert s.submit([1], 3).finish() == f"UNAVAILABLE: {stage.name}: {reason}"
        stage.heal()
        s.wait_ready()
        assert s.service.status()["incarnation"] not in (0, before)
        assert s.submit([4, 2], 30).finish() == "length"
        assert s.clients[-1].tokens == reference([4, 2], 30)
        s.wait_free()


def assert_matches(got: str, pattern: str) -> None:
    assert re.fullmatch(pattern, got), got


def test_a_stage_that_does_not_say_how_it_is_counts_as_lost() -> None:
    with serving(1, limits={"heartbeat_timeout_s": 100.0}) as s:
        clients = start_streams(s)
        s.stages[0].deaf.set()
        s.stages[0].is_asked.wait()
        s.let_pass(101.0)
        for client in clients:
            assert client.finish() == "INTERNAL: stage_0: has not answered for 100 s"
        assert "UNAVAILABLE" in s.submit([1], 3).finish()
        assert s.clients[-1].finish().endswith("stage_0: has not answered for 100 s")
        s.stages[0].heal()
        s.wait_ready()
        assert s.submit([4, 2], 30).finish() == "length"
        s.wait_free()


@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_that_was_replaced_has_lost_its_sessions(index: int) -> None:
    with serving() as s:
        before = s.service.status()["incarnation"]
        s.stages[index].restart()
        wait_until(lambda: s.service.status()["incarnation"] not in (0, before), "it starts anew")
        s.wait_ready()
        assert s.submit([4, 2], 30).finish() == "length"
        assert s.clients[-1].tokens == reference([4, 2], 30)


@pytest.mark.parametrize("index", [0, 1])
def test_an_answer_that_makes_no_sense_ends_the_pipeline(index: int) -> None:
    with serving() as s:
        clients = start_streams(s)
        s.stages[index].garbled = True
        for client in clients:
            assert f"INTERNAL: stage_{index}: answered frame" in client.finish()
        s.stages[index].heal()
        wait_until(lambda: s.submit([4, 2], 5).finish() == "length", "it serves again")
        s.wait_free()


def test_between_the_loss_and_the_next_answer_of_every_stage_nothing_is_promised() -> None:
    with serving() as s:
        clients = start_streams(s)
        for stage in s.stages:
            stage.deaf.set()
            stage.is_asked.wait()
        s.stages[1].garbled = True
        for client in clients:
            client.finish()
        for _ in range(20):
            time.sleep(0.01)
            assert s.submit([1], 3).finish().startswith("UNAVAILABLE: lost stage_1: ")
        for stage in s.stages:
            stage.heal()
        s.wait_ready()
        assert s.submit([1], 3).finish() == "length"


def test_stop_after_a_loss_waits_for_nothing() -> None:
    with serving() as s:
        clients = start_streams(s)
        s.stages[1].gone = True
        for client in clients:
            client.finish()
        s.service.stop()
        assert "shutting down" in s.submit([1], 3).finish()


def test_stop_while_a_stage_hangs_answers_everybody() -> None:
    with serving(limits={"drain_timeout_s": 0.0}) as s:
        clients = start_streams(s)
        s.stages[1].hang()
        s.stages[1].engine_is_stuck.wait()
        s.service.stop()
        for client in clients:
            assert client.finish() == "UNAVAILABLE: the server is shutting down"


def test_a_panic_in_an_engine_is_the_error_of_who_ran_and_who_waits_is_served() -> None:
    """A panicking operation while a request is queued (spec 12.13)."""

    def fault(batch: Batch) -> None:
        if any(rows.sequence == bad.session and rows.past >= 5 for rows in batch.sequences):
            raise IndexError("worker panicked")

    with serving(scheduler=SchedulerSection(max_sessions=1)) as s:
        bad = Client()
        s.stages[1].engine.fault = fault
        s.submit([3, 4], 50_000, client=bad)
        queued = s.submit([5], 20)
        assert bad.finish() == "INTERNAL: stage_1: IndexError: worker panicked"
        assert queued.finish() == "length"
        assert queued.tokens == reference([5], 20)
        s.wait_free()


class Bug:
    """A method of the core that fails, the first ``times`` times after it was armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self._times = 0
        self._original = getattr(Core, method)
        self.seen = threading.Event()
        bug = self

        def broken(core: Core, *args: Any, **options: Any) -> Any:
            if bug._times:
                bug._times -= 1
                bug.seen.set()
                raise RuntimeError("off by one")
            return bug._original(core, *args, **options)

        monkeypatch.setattr(Core, method, broken)

    def arm(self, times: int = 1) -> None:
        self._times = times


@pytest.mark.parametrize(
    "method", ["next_frame", "frame_left_stage", "frame_done", "tick", "take_outputs", "cancel"]
)
def test_a_bug_in_the_core_ends_its_sessions_and_serving_goes_on(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    bug = Bug(monkeypatch, method)
    with serving() as s:
        clients = start_streams(s)
        bug.arm()
        s.service.cancel(clients[0].session)
        assert bug.seen.wait(30)
        for client in clients[1:]:
            assert client.finish() == "INTERNAL: orchestrator: off by one"
        s.wait_ready()
        assert s.submit([4, 2], 5).finish() == "length"
        s.wait_free()


def test_a_core_that_cannot_even_end_leaves_nobody_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Bug(monkeypatch, "fail_all")
    bug = Bug(monkeypatch, "frame_done")
    with serving(scheduler=ONE_GROUP) as s:
        clients = start_streams(s)
        ending.arm()
        bug.arm()
        for client in clients:
            assert client.finish() == "INTERNAL: orchestrator: off by one"
        s.wait_ready()
        assert s.submit([4, 2], 5).finish() == "length"
        s.wait_free()


def test_a_bug_in_taking_a_request_is_that_requests_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = Bug(monkeypatch, "submit")
    with serving() as s:
        bug.arm()
        assert s.submit([4, 2], 5).finish() == "INTERNAL: orchestrator: off by one"
        assert s.submit([4, 2], 5).finish() == "length"


def test_a_lost_integrity_shows_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as s:

        def failing(core: Core) -> None:
            raise AssertionError("3 places held by 2 sessions")

        with monkeypatch.context() as patch:
            patch.setattr(Core, "check_integrity", failing)
            wait_until(lambda: "3 places" in s.service.status()["integrity"], "the check has failed")
        wait_until(lambda: s.service.status()["integrity"] == "", "all is well again")
        assert s.submit([4, 2], 5).finish() == "length"
