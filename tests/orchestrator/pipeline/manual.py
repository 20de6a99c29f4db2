"""A transport whose every answer a test gives by hand."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from skippy_orchestrator.frames import Frame
from skippy_stage.errors import SkippyError
from skippy_stage.protocol import (
    DecodeStep,
    Draft,
    DraftResult,
    FrameHeader,
    FrameResult,
    StageStatus,
    StepOk,
    StepStatus,
)

GENEROUS_S = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.002)


def a_status(name: str = "stage", **values: Any) -> StageStatus:
    plain: dict[str, Any] = {
        "name": name,
        "index": 0,
        "engine": "scripted",
        "architecture": "llama",
        "first_layer": 0,
        "last_layer": 4,
        "n_layers": 4,
        "hidden_size": 8,
        "vocab_size": 100,
        "context_length": 64,
        "link_dtype": "f32",
        "kv_block_tokens": 4,
        "kv_blocks": 16,
    }
    return StageStatus(**{**plain, **values})


def a_frame(number: int, sessions: int = 1) -> Frame:
    """A frame with one decode step for each of some sessions."""
    steps = tuple(DecodeStep(session=i + 1, epoch=0, pos_start=number) for i in range(sessions))
    return Frame(number, steps, tuple(range(sessions)), ended=())


class ManualPending:
    """A frame that waits for the test to answer it."""

    def __init__(self, header: FrameHeader, tokens: Any, hidden: Any) -> None:
        self.header = header
        self.tokens = tokens
        self.hidden = hidden
        self.waited_for = False
        self._answer: queue.SimpleQueue[tuple[FrameResult, Any] | Exception] = queue.SimpleQueue()
        self._drafts: queue.SimpleQueue[DraftResult | Exception] = queue.SimpleQueue()

    def answer(
        self, hidden: Any = None, statuses: tuple[StepStatus, ...] | None = None, **figures: Any
    ) -> None:
        """Every step is ok, unless said otherwise; ``figures`` are what the stage says of its work."""
        header = self.header
        given = (StepOk(),) * len(header.steps) if statuses is None else statuses
        result = FrameResult(incarnation=header.incarnation, frame=header.frame, statuses=given, **figures)
        self._answer.put((result, hidden))

    def fail(self, error: Exception) -> None:
        self._answer.put(error)

    def follow(self, *drafts: Draft) -> None:
        """The drafts behind an answer that said ``drafts_follow``."""
        header = self.header
        self._drafts.put(DraftResult(incarnation=header.incarnation, frame=header.frame, drafts=drafts))

    def fail_to_follow(self, error: Exception) -> None:
        self._drafts.put(error)

    def drafts(self) -> DraftResult:
        drafts = self._drafts.get()
        if isinstance(drafts, Exception):
            raise drafts
        return drafts

    def wait(self) -> tuple[FrameResult, Any]:
        answer = self._answer.get()
        self.waited_for = True
        if isinstance(answer, Exception):
            raise answer
        return answer


class ManualTransport:
    """Keeps what is sent; ``on_send`` may block or raise first."""

    def __init__(self, name: str = "stage_0") -> None:
        self.name = name
        self.on_send: Callable[[FrameHeader], None] = lambda header: None
        self.outstanding = 0
        self.most_outstanding = 0
        self._frames: queue.SimpleQueue[ManualPending] = queue.SimpleQueue()

    def send(self, header: FrameHeader, tokens: Any, hidden: Any) -> ManualPending:
        self.on_send(header)
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        pending = ManualPending(header, tokens, hidden)
        self._frames.put(pending)
        return pending

    def next(self) -> ManualPending:
        """Wait for the next frame that is sent; it is then the test's turn."""
        pending = self._frames.get(timeout=GENEROUS_S)
        self.outstanding -= 1
        return pending

    @property
    def has_frames(self) -> bool:
        return not self._frames.empty()

    def status(self, *, check_integrity: bool = False) -> StageStatus:
        return a_status(self.name)

    def is_gone(self) -> bool:
        return False

    def revive(self) -> None:
        raise SkippyError("cannot be revived")


class ManualStage:
    """The status side of a transport: every question waits for the test's answer."""

    def __init__(self, name: str = "stage_0") -> None:
        self.name = name
        self.gone = False
        self.revived = 0
        self.on_revive: Callable[[], None] = lambda: None
        self.questions: queue.SimpleQueue[queue.SimpleQueue[StageStatus | Exception]] = queue.SimpleQueue()
        self.asked = 0
        self._lock = threading.Lock()

    def send(self, header: FrameHeader, tokens: Any, hidden: Any) -> ManualPending:
        raise SkippyError("takes no frames")

    def status(self, *, check_integrity: bool = False) -> StageStatus:
        assert check_integrity, "a heartbeat asks for the stage's integrity too"
        with self._lock:
            self.asked += 1
        question: queue.SimpleQueue[StageStatus | Exception] = queue.SimpleQueue()
        self.questions.put(question)
        answer = question.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def next_question(self) -> queue.SimpleQueue[StageStatus | Exception]:
        return self.questions.get(timeout=GENEROUS_S)

    def is_gone(self) -> bool:
        return self.gone

    def revive(self) -> None:
        self.revived += 1
        self.on_revive()
