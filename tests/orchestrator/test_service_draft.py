"""A service with a draft model's stage: it drafts, it may go and come back, and nobody's tokens change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from skippy_orchestrator.deployment import SpeculationPlan
from skippy_stage.engines.base import Batch

from tests.orchestrator.faulty_stage import FaultyStage
from tests.orchestrator.serving import Client, Serving, serving, wait_until
from tests.scripted import reference

PLAN = SpeculationPlan(draft_model=True, speculative_window=3)


def drafted(s: Serving) -> int:
    return int(s.service.status()["draft"]["counters"]["drafts"])


def draft_ready(s: Serving) -> bool:
    return bool(s.service.status()["draft"]["ready"])


def draft_stage(s: Serving) -> FaultyStage:
    assert s.draft is not None
    return s.draft


def ask(s: Serving, start: int, count: int = 30) -> Client:
    return s.submit([start, 7, 3], count, speculation=PLAN)


def assert_right(s: Serving, client: Client, start: int, count: int = 30) -> None:
    assert client.finish() == "length"
    assert client.tokens == reference([start, 7, 3], count)


def test_drafts_of_the_model_itself_are_all_right() -> None:
    with serving(2, draft=True) as s:
        wait_until(lambda: draft_ready(s), "the draft model is ready")
        clients = {start: ask(s, start) for start in range(5)}
        for start, client in clients.items():
            assert_right(s, client, start)
            counters = client.spans[-1].speculation
            assert counters is not None
            assert counters.accepted_draft_tokens == counters.draft_tokens > 10
        s.wait_free()


def refuse(stage: FaultyStage) -> None:
    stage.broken = "connection refused"


def die(stage: FaultyStage) -> None:
    stage.gone = True


def restart(stage: FaultyStage) -> None:
    stage.restart()


@pytest.mark.parametrize("fault", [refuse, die, restart])
def test_requests_go_on_without_a_draft_model_that_is_lost(fault: Callable[[FaultyStage], None]) -> None:
    with serving(2, draft=True) as s:
        wait_until(lambda: draft_ready(s), "the draft model is ready")
        running = {start: ask(s, start, 700) for start in range(3)}
        before = drafted(s)
        wait_until(lambda: drafted(s) > before + 20, "the draft model drafts")
        incarnation = s.service.status()["incarnation"]
        fault(draft_stage(s))
        if fault is not restart:
            wait_until(lambda: not draft_ready(s), "the loss is known")
            assert_right(s, ask(s, 9), 9)
        for start, client in running.items():
            assert_right(s, client, start, 700)
        assert s.service.status()["incarnation"] == incarnation, "the target's pipeline has gone on"
        draft_stage(s).heal()
        wait_until(lambda: draft_ready(s), "the draft model is back")
        after = drafted(s)
        assert_right(s, ask(s, 11), 11)
        assert drafted(s) > after
        s.wait_free()


def test_a_draft_model_that_hangs_is_given_up_and_waited_for() -> None:
    with serving(2, draft=True, limits={"frame_deadline_s": 100.0}) as s:
        wait_until(lambda: draft_ready(s), "the draft model is ready")
        stage = draft_stage(s)
        stage.hang()
        client = ask(s, 1)
        stage.engine_is_stuck.wait()
        s.let_pass(101.0)
        assert_right(s, client, 1)
        wait_until(lambda: not draft_ready(s), "the loss is known")
        stage.heal()
        wait_until(lambda: draft_ready(s), "the draft model is back")
        assert_right(s, ask(s, 2), 2)
        s.wait_free()


def test_a_lost_stage_of_the_target_ends_the_drafting_too() -> None:
    with serving(2, draft=True) as s:
        wait_until(lambda: draft_ready(s), "the draft model is ready")
        client = ask(s, 1, 3000)
        client.wait_for_tokens(20)
        s.stages[0].restart()
        assert client.finish().startswith("INTERNAL: stage_0: ")
        s.wait_ready()
        wait_until(lambda: draft_ready(s), "the draft model drafts again")
        before = drafted(s)
        assert_right(s, ask(s, 2), 2)
        assert drafted(s) > before
        s.wait_free()


def test_a_failing_step_of_the_draft_model_fails_no_request() -> None:
    with serving(2, draft=True) as s:
        wait_until(lambda: draft_ready(s), "the draft model is ready")

        def fault(batch: Batch) -> None:
            raise RuntimeError("no more of this")

        draft_stage(s).engine.fault = fault
        assert_right(s, ask(s, 1), 1)
        assert s.service.status()["ready"]


def test_serving_does_not_wait_for_the_draft_model() -> None:
    with serving(2, draft=True, start=False) as s:
        draft_stage(s).broken = "is still loading"
        s.start()
        assert_right(s, ask(s, 1), 1)
        assert s.service.status()["draft"]["reason"].endswith("is still loading")
        assert s.service.status()["ready"]
