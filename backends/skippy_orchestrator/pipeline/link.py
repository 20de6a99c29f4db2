"""A link: the ordered way to one stage.

One dispatcher thread sends frames in order and waits for each acknowledgement; one reader thread takes the
results, in the same order. Two threads that send to one stage would reorder frames, and a call that waits
for its result instead of an early acknowledgement would hold a thread of the server's pool.

``depth`` frames may be outstanding. A call to a stage that died may never return: no thread is joined
without a limit, and a stopped link's threads end by themselves when their call does.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from skippy_stage.engines.base import Hidden
from skippy_stage.protocol import DraftResult, FrameHeader, FrameResult, StageStatus

from skippy_orchestrator.pipeline.flight import Flight

log = logging.getLogger(__name__)


class Pending(Protocol):
    """A frame that a stage has acknowledged."""

    def wait(self) -> tuple[FrameResult, Hidden | None]:
        """Block until the frame's result is there; raises SkippyError when it never will be."""
        ...

    def drafts(self) -> DraftResult:
        """Behind a result that says so: block until its drafts are there, or raise as ``wait``."""
        ...


class Transport(Protocol):
    """What carries frames to a stage: BLS inside a server, a function call in one process."""

    @property
    def name(self) -> str:
        """The stage's name."""
        ...

    def send(self, header: FrameHeader, tokens: npt.NDArray[np.int32], hidden: Hidden | None) -> Pending:
        """Send a frame and block until it is acknowledged; raises SkippyError when it is refused."""
        ...

    def status(self, *, check_integrity: bool = False) -> StageStatus:
        """Ask for the stage's status, outside the order of frames; raises SkippyError without answer."""
        ...

    def is_gone(self) -> bool:
        """Whether the stage that answered last is known to exist no more."""
        ...

    def revive(self) -> None:
        """Bring a stage back that is gone; takes as long as loading it, raises SkippyError when it can't be."""
        ...


OnResult = Callable[[Flight, FrameResult, Hidden | None, float], None]
"""The last argument is the seconds from sending the frame to having its result."""
OnDrafts = Callable[[DraftResult], None]
OnFailure = Callable[[str, str], None]
MakeHeader = Callable[[Flight], FrameHeader]


class Link:
    """Frames on their way to one stage and back."""

    def __init__(
        self,
        transport: Transport,
        depth: int,
        make_header: MakeHeader,
        on_result: OnResult,
        on_drafts: OnDrafts,
        on_failure: OnFailure,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = transport.name
        self._transport = transport
        self._make_header = make_header
        self._on_result = on_result
        self._on_drafts = on_drafts
        self._on_failure = on_failure
        self._clock = clock
        self._places = threading.Semaphore(depth)
        self._to_send: queue.SimpleQueue[tuple[Flight, float] | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[Flight, Pending] | None] = queue.SimpleQueue()
        self._sent_at: deque[float] = deque()
        self._drafting_since: float | None = None
        self._stopped = threading.Event()
        self._failing = threading.Lock()
        self._threads = [
            threading.Thread(target=loop, name=f"{self.name}-{role}", daemon=True)
            for role, loop in (("dispatcher", self._dispatch), ("reader", self._read))
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, flight: Flight, arrival: float = 0.0) -> None:
        """Queue a frame, which a simulated network lets arrive at that time; never blocks."""
        self._to_send.put((flight, arrival))

    def overdue(self, now: float, limit_s: float) -> bool:
        """Whether the oldest outstanding frame, or its drafts, have kept the stage for longer than ``limit_s``."""
        drafting_since = self._drafting_since
        if drafting_since is not None and now - drafting_since > limit_s:
            return True
        try:
            return now - self._sent_at[0] > limit_s
        except IndexError:
            return False

    def stop(self) -> None:
        """Take no more frames and report nothing any more; does not wait."""
        self._stopped.set()
        self._to_send.put(None)
        self._places.release()

    def join(self, timeout: float) -> bool:
        """Wait for the threads of a stopped link, ``timeout`` s in all; False when one is still stuck."""
        deadline = self._clock() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _fail(self, error: Exception) -> None:
        with self._failing:
            if self._stopped.is_set():
                return
            self.stop()
        log.warning("%s: %s", self.name, error)
        self._on_failure(self.name, str(error).removeprefix(f"{self.name}: "))

    def _dispatch(self) -> None:
        try:
            while (item := self._to_send.get()) is not None:
                flight, arrival = item
                if arrival and (early := arrival - self._clock()) > 0:
                    self._stopped.wait(early)
                self._places.acquire()
                if self._stopped.is_set():
                    return
                self._sent_at.append(self._clock())
                pending = self._transport.send(self._make_header(flight), flight.tokens(), flight.hidden)
                self._to_read.put((flight, pending))
        except Exception as error:
            self._fail(error)
        finally:
            self._to_read.put(None)

    def _read(self) -> None:
        # What is outstanding when the link stops is waited for all the same: a call must be taken to its end
        # (finished_calls).
        while (item := self._to_read.get()) is not None:
            flight, pending = item
            try:
                result, hidden = pending.wait()
                if not self._stopped.is_set():
                    call_s = self._clock() - self._sent_at.popleft()
                    self._places.release()
                    self._on_result(flight, result, hidden, call_s)
                if result.drafts_follow:
                    self._drafting_since = self._clock()
                    drafts = pending.drafts()
                    self._drafting_since = None
                    if not self._stopped.is_set():
                        self._on_drafts(drafts)
            except Exception as error:
                self._fail(error)
