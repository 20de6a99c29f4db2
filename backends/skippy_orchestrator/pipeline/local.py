"""Stages in this process: for tests, and for measuring what the server adds."""

from __future__ import annotations

import queue
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from skippy_stage.engines.base import Hidden
from skippy_stage.errors import ProtocolError, SkippyError
from skippy_stage.protocol import DraftResult, FrameHeader, FrameResult, StageStatus, decode_request, encode
from skippy_stage.runtime import StageRuntime
from skippy_stage.worker import StageWorker

_Answer: TypeAlias = tuple[FrameResult | DraftResult, Hidden | None] | SkippyError


class LocalPending:
    """A frame that a stage in this process has queued."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()

    def put(self, answer: _Answer) -> None:
        """The stage answers."""
        self._answers.put(answer)

    def wait(self) -> tuple[FrameResult, Hidden | None]:
        """Block until the stage has answered."""
        result, hidden = self._next()
        if not isinstance(result, FrameResult):
            raise ProtocolError(f"answered a frame with {type(result).__name__}")
        return result, hidden

    def drafts(self) -> DraftResult:
        """Block until the drafts behind the result are there."""
        result, _ = self._next()
        if not isinstance(result, DraftResult):
            raise ProtocolError(f"followed a result by {type(result).__name__}, expected drafts")
        return result

    def _next(self) -> tuple[FrameResult | DraftResult, Hidden | None]:
        answer = self._answers.get()
        if isinstance(answer, SkippyError):
            raise answer
        return answer


class LocalTransport:
    """Calls a stage runtime directly, with a worker thread of its own; headers are encoded all the same."""

    def __init__(self, name: str, runtime: StageRuntime[LocalPending]) -> None:
        self.name = name
        self.runtime = runtime
        self._outstanding: set[LocalPending] = set()
        self._worker = StageWorker(lambda: runtime, self._respond, name)
        self._worker.start()

    def send(self, header: FrameHeader, tokens: npt.NDArray[np.int32], hidden: Hidden | None) -> LocalPending:
        """Queue a frame with the stage."""
        decoded = decode_request(encode(header))
        if not isinstance(decoded, FrameHeader):
            raise SkippyError(f"a {type(decoded).__name__} sent as a frame")
        pending = LocalPending()
        self._outstanding.add(pending)
        for old in self.runtime.accept(decoded, tokens, hidden, pending):
            self._end(old, SkippyError("the pipeline started anew before this frame ran"))
        return pending

    def status(self, *, check_integrity: bool = False) -> StageStatus:
        """The stage's status."""
        return self.runtime.status(check_integrity=check_integrity)

    def is_gone(self) -> bool:
        """False: it lives as long as this process."""
        return False

    def revive(self) -> None:
        """Refused: there is nothing to bring back."""
        raise SkippyError(f"{self.name}: is part of this process")

    def close(self, timeout: float = 5.0) -> None:
        """Stop the stage's worker; what it has not answered gets an error."""
        self._worker.stop(timeout)
        for pending in list(self._outstanding):
            self._end(pending, SkippyError("the stage has stopped"))

    def _respond(
        self, pending: LocalPending, result: FrameResult | DraftResult, hidden: Hidden | None
    ) -> None:
        if isinstance(result, FrameResult) and result.drafts_follow:
            pending.put((result, hidden))
        else:
            self._end(pending, (result, hidden))

    def _end(self, pending: LocalPending, answer: _Answer) -> None:
        self._outstanding.discard(pending)
        pending.put(answer)
