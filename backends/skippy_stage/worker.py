"""The one thread of a stage that computes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from skippy_stage.engines.base import Hidden
from skippy_stage.protocol import DraftResult, FrameResult
from skippy_stage.runtime import StageRuntime

R = TypeVar("R", bound=Hashable)
Load = Callable[[], StageRuntime[R]]
Respond = Callable[[R, FrameResult | DraftResult, Hidden | None], None]
"""With a result, and once more with its drafts where it says that they follow."""

log = logging.getLogger(__name__)


class StageWorker(Generic[R]):
    """Loads a runtime, executes what is queued there, and hands every result to ``respond`` in frame order.

    Loading is the worker's too, so that a single thread of the process ever enters OpenMP. Each that does
    keeps a team of its own, and with more threads in all teams than cores libgomp stops waiting actively:
    the row of a 135M model then takes two threads as long as one.

    ``on_crash`` is called when the runtime itself fails; the worker then ends.
    """

    def __init__(
        self, load: Load[R], respond: Respond[R], name: str, on_crash: Callable[[], None] = lambda: None
    ) -> None:
        self._load = load
        self._respond = respond
        self._on_crash = on_crash
        self._runtime: StageRuntime[R] | None = None
        self._loaded: queue.SimpleQueue[StageRuntime[R] | Exception] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"{name}-worker", daemon=True)

    def start(self) -> StageRuntime[R]:
        """Start the thread; returns when it has loaded the runtime, raises what loading raises."""
        self._thread.start()
        loaded = self._loaded.get()
        if isinstance(loaded, Exception):
            raise loaded
        self._runtime = loaded
        return loaded

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end after the frame it is at; False when it did not within ``timeout`` s."""
        self._stopping.set()
        if self._runtime is not None:
            self._runtime.wake()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            runtime = self._load()
        except Exception as error:
            self._loaded.put(error)
            return
        self._loaded.put(runtime)
        while not self._stopping.is_set():
            frame = runtime.take(timeout=1.0)
            if frame is None:
                continue
            try:
                result, hidden = runtime.execute(frame)
                self._answer(frame.reply, result, hidden)
                drafts = runtime.draft(frame)
            except Exception:
                # Faults of steps don't get here: this is a bug, and what the runtime holds can't be trusted.
                log.exception("the stage's worker failed")
                self._on_crash()
                return
            if drafts is not None:
                self._answer(frame.reply, drafts, None)

    def _answer(self, reply: R, result: FrameResult | DraftResult, hidden: Hidden | None) -> None:
        try:
            self._respond(reply, result, hidden)
        except Exception:
            log.exception("frame %d was executed but not answered", result.frame)
