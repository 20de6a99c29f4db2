"""Readiness: what stages must agree on, and heartbeats that hang, fail or find their stage gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from skippy_orchestrator.pipeline.monitor import Monitor, StageHealth, disagreement
from skippy_stage.errors import SkippyError, StageFault

from tests.orchestrator.pipeline.manual import GENEROUS_S, ManualStage, a_status, wait_until

TIMEOUT_S = 5.0


def pipeline(*changes: dict[str, Any]) -> list[Any]:
    """Statuses of stages that agree, with changes by stage."""
    plain = [
        {"name": "a", "index": 0, "first_layer": 0, "last_layer": 2},
        {"name": "b", "index": 1, "first_layer": 2, "last_layer": 3},
        {"name": "c", "index": 2, "first_layer": 3, "last_layer": 4},
    ]
    return [a_status(**{**stage, **change}) for stage, change in zip(plain, changes, strict=True)]


def test_stages_that_make_one_model_agree() -> None:
    assert disagreement(pipeline({}, {}, {}), 100) == ""
    assert disagreement(pipeline({}, {}, {}), 90) == ""
    assert disagreement([a_status("whole")], 100) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (({"index": 1}, {}, {}), "a: is stage 1, expected 0"),
        (({}, {"index": 2}, {}), "b: is stage 2, expected 1"),
        (({"first_layer": 1}, {}, {}), "a: starts at layer 1, expected 0"),
        (({}, {"first_layer": 1}, {}), "b: starts at layer 1, expected 2"),
        (({}, {}, {"first_layer": 4}), "c: starts at layer 4, expected 3"),
        (({}, {}, {"last_layer": 3}), "c: ends at layer 3 of 4"),
        (({}, {"architecture": "qwen2"}, {}), "b: has architecture qwen2, a has llama"),
        (({}, {}, {"n_layers": 5}), "c: has n_layers 5, a has 4"),
        (({}, {"hidden_size": 16}, {}), "b: has hidden_size 16, a has 8"),
        (({}, {}, {"vocab_size": 99}), "c: has vocab_size 99, a has 100"),
        (({}, {"link_dtype": "f16"}, {}), "b: has link_dtype f16, a has f32"),
    ],
)
def test_a_disagreement_names_the_stage_and_the_value(changes: Any, message: str) -> None:
    assert disagreement(pipeline(*changes), 100) == message


def test_the_tokenizer_must_fit_into_the_vocabulary() -> None:
    assert disagreement([a_status("a")], 101) == "a: has a vocabulary of 100, the tokenizer 101"


class Rig:
    """A monitor of stages that are answered by hand, in a time that is set by hand."""

    def __init__(self, *names: str) -> None:
        self.now = 10.0
        self.stages = [ManualStage(name) for name in names]
        self.monitor = Monitor(self.stages, 0.001, TIMEOUT_S, 100, clock=lambda: self.now)

    @property
    def problem(self) -> str:
        return self.monitor.problem(self.monitor.health())

    @property
    def health(self) -> StageHealth:
        return self.monitor.health()[0]

    @property
    def threads(self) -> int:
        names = {f"{stage.name}-heartbeat" for stage in self.stages}
        return sum(thread.name in names for thread in threading.enumerate())

    def close(self) -> None:
        self.monitor.stop()

        def ended() -> bool:
            for stage in self.stages:
                while not stage.questions.empty():
                    stage.questions.get().put(SkippyError("is closed"))
            return not self.threads

        wait_until(ended)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("stage_0")
    yield rig
    rig.close()


def test_not_ready_until_every_stage_has_answered() -> None:
    rig = Rig("a", "b")
    assert rig.problem == "a: has not answered yet"
    rig.stages[0].next_question().put(a_status("a", index=0, last_layer=2))
    wait_until(lambda: rig.problem != "a: has not answered yet")
    assert rig.problem == "b: has not answered yet"
    rig.stages[1].next_question().put(a_status("b", index=1, first_layer=2))
    wait_until(lambda: rig.problem == "")
    assert [stage.name for stage in rig.monitor.health()] == ["a", "b"]
    rig.close()


def test_a_disagreement_is_a_problem() -> None:
    rig = Rig("a")
    rig.stages[0].next_question().put(a_status("a", index=3))
    wait_until(lambda: rig.problem == "a: is stage 3, expected 0")
    rig.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StageFault("stage_0", "no such model"), "no such model"),
        (SkippyError("no such model"), "no such model"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_heartbeat_that_fails_says_why_and_the_last_status_stays(
    rig: Rig, error: Exception, reason: str
) -> None:
    status = a_status()
    rig.stages[0].next_question().put(status)
    wait_until(lambda: rig.problem == "")
    rig.stages[0].next_question().put(error)
    wait_until(lambda: rig.problem == f"stage_0: {reason}")
    assert rig.health == StageHealth("stage_0", status, reason, asked_at=10.0)
    rig.stages[0].next_question().put(status)
    wait_until(lambda: rig.problem == "")


def test_it_is_known_when_a_stage_was_asked_for_its_status(rig: Rig) -> None:
    question = rig.stages[0].next_question()
    rig.now = 12.0
    question.put(a_status())
    wait_until(lambda: rig.health.asked_at == 10.0)
    rig.stages[0].next_question().put(a_status())
    wait_until(lambda: rig.health.asked_at == 12.0)


def test_a_heartbeat_that_hangs_is_replaced_and_its_late_answer_does_not_count(rig: Rig) -> None:
    stuck = rig.stages[0].next_question()
    rig.now += TIMEOUT_S
    assert rig.problem == "stage_0: has not answered yet"
    rig.now += 0.1
    assert rig.problem == "stage_0: has not answered for 5 s"
    fresh = rig.stages[0].next_question()
    fresh.put(a_status(pid=2))
    wait_until(lambda: rig.problem == "")
    assert rig.threads == 2
    stuck.put(a_status(pid=1))
    wait_until(lambda: rig.threads == 1)
    assert rig.health.status == a_status(pid=2)


def test_only_so_many_heartbeats_hang_at_the_same_time_and_a_freed_one_makes_room(rig: Rig) -> None:
    stuck = []
    for _ in range(9):
        stuck.append(rig.stages[0].next_question())
        rig.now += TIMEOUT_S + 0.1
        assert rig.problem == "stage_0: has not answered for 5 s"
    assert rig.threads == 9, "the ninth is left alone"
    rig.now += TIMEOUT_S
    assert rig.problem == "stage_0: has not answered for 5 s"
    stuck[0].put(SkippyError("was killed"))
    wait_until(lambda: bool(rig.problem) and rig.stages[0].asked == 10)
    rig.stages[0].next_question().put(a_status())
    wait_until(lambda: rig.problem == "")
    for question in stuck[1:]:
        question.put(SkippyError("was killed"))


def test_a_stage_that_is_gone_is_revived_and_not_asked(rig: Rig) -> None:
    stage = rig.stages[0]
    question = stage.next_question()
    loading, loaded = threading.Event(), threading.Event()

    def revive() -> None:
        loading.set()
        loaded.wait()
        stage.gone = False

    stage.on_revive = revive
    stage.gone = True
    question.put(a_status())
    assert loading.wait(GENEROUS_S)
    assert rig.problem == "stage_0: its process has ended, it is being loaded again"
    rig.now += 1000.0
    assert "loaded again" in rig.problem, "loading may take its time"
    assert stage.asked == 1
    loaded.set()
    stage.next_question().put(a_status())
    wait_until(lambda: rig.problem == "")
    assert stage.revived == 1


def test_a_stage_that_cannot_be_revived_says_why_and_is_tried_again(rig: Rig) -> None:
    stage = rig.stages[0]
    question = stage.next_question()

    def revive() -> None:
        raise StageFault("stage_0", f"load was refused {stage.revived} times")

    stage.on_revive = revive
    stage.gone = True
    question.put(a_status())
    wait_until(lambda: rig.problem.startswith("stage_0: load was refused "))
    wait_until(lambda: stage.revived > 2)
    assert stage.asked == 1
    stage.gone = False
    stage.next_question().put(a_status())
    wait_until(lambda: rig.problem == "")


def test_a_revived_stage_that_does_not_answer_is_noticed(rig: Rig) -> None:
    stage = rig.stages[0]
    question = stage.next_question()

    def revive() -> None:
        stage.gone = False

    stage.on_revive = revive
    stage.gone = True
    question.put(a_status())
    dead = stage.next_question()
    wait_until(lambda: "loaded again" in rig.problem)
    rig.now += TIMEOUT_S + 0.1
    assert rig.problem == "stage_0: has not answered for 5 s"
    stage.next_question().put(a_status())
    wait_until(lambda: rig.problem == "")
    dead.put(SkippyError("was killed"))


def test_a_heartbeat_survives_a_fault_of_its_transport(rig: Rig) -> None:
    stage = rig.stages[0]
    question = stage.next_question()

    def broken() -> bool:
        raise OSError("too many open files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "is_gone", broken)
        question.put(a_status())
        wait_until(lambda: rig.problem == "stage_0: too many open files")
    stage.next_question().put(a_status())
    wait_until(lambda: rig.problem == "")
