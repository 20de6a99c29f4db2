"""The one thread of a stage that executes frames."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from skippy_stage.engines.base import Hidden
from skippy_stage.protocol import FrameResult
from skippy_stage.runtime import StageRuntime

R = TypeVar("R", bound=Hashable)
Respond = Callable[[R, FrameResult, Hidden | None], None]

log = logging.getLogger(__name__)


class StageWorker(Generic[R]):
    """Executes what a runtime queued and hands every result to ``respond``, in frame order."""

    def __init__(self, runtime: StageRuntime[R], respond: Respond[R], name: str) -> None:
        self._runtime = runtime
        self._respond = respond
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"{name}-worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end after the frame it is at; False when it did not within ``timeout`` s."""
        self._stopping.set()
        self._runtime.wake()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._stopping.is_set():
            frame = self._runtime.take(timeout=1.0)
            if frame is None:
                continue
            result, hidden = self._runtime.execute(frame)
            try:
                self._respond(frame.reply, result, hidden)
            except Exception:
                log.exception("frame %d was executed but not answered", result.frame)
