"""The runtime of a stage: frames in order, what must not wait, and how the stage is.

Two threads meet here. The one that receives calls ``accept``: it checks a frame, applies what must not
wait (a new incarnation, ended sessions, live epochs) and queues it. The one worker calls ``execute``: it
owns the engine and runs queued frames in number order (execution.py says how). Neither Triton nor torch
is known here.

Invariants:

* Frames are executed in the order of their numbers (frame_queue).
* A new incarnation leaves no session of an old one; recorded prefixes stay.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
import numpy as np
import psutil

from skippy_stage import protocol
from skippy_stage.drafting import HeadDrafts
from skippy_stage.engines.base import Hidden, StageEngine
from skippy_stage.errors import ProtocolError
from skippy_stage.execution import FrameExecutor
from skippy_stage.frame_queue import FrameQueue, QueuedFrame, Tokens, Urgent
from skippy_stage.prefix.activations import ActivationCache
from skippy_stage.prefix.store import NoPrefixes, PrefixStore
from skippy_stage.protocol import DraftResult, FrameHeader, FrameResult, PrefixStatus, StageStatus
from skippy_stage.sessions import SessionTable

R = TypeVar("R", bound=Hashable)
Clock = Callable[[], float]


@dataclass(slots=True)
class StageCounters:
    """Totals since the stage started, and what the last frame left."""

    kv_blocks_used: int = 0
    sessions: int = 0
    frames: int = 0
    rows: int = 0
    busy_us: int = 0
    last_error: str = ""
    prefix: PrefixStatus = field(default_factory=PrefixStatus)


class StageRuntime(Generic[R]):
    """Runs the frames of one stage on one engine. ``R`` is whatever answers a frame (a response sender)."""

    def __init__(
        self,
        engine: StageEngine,
        name: str,
        index: int = 0,
        threads: int = 0,
        clock: Clock = time.monotonic,
        *,
        prefixes: PrefixStore | None = None,
        activations: ActivationCache | None = None,
        identity: str = "",
    ):
        self._engine = engine
        self._name = name
        self._index = index
        self._threads = threads
        self._cores = len(os.sched_getaffinity(0))
        self._clock = clock
        self._process = psutil.Process()
        self._queue: FrameQueue[R] = FrameQueue()
        self._prefixes = prefixes or NoPrefixes()
        self._activations = activations or ActivationCache(0)
        self._identity = identity
        self._sessions = SessionTable(engine, self._prefixes)
        self._head = HeadDrafts(engine, self._sessions)
        self._executor: FrameExecutor[R] = FrameExecutor(
            engine, self._sessions, self._activations, self._head
        )
        self._counters = StageCounters(prefix=self._prefix_status())
        self._working = threading.Lock()

    # The receiving thread.

    def accept(self, header: FrameHeader, tokens: Tokens, hidden: Hidden | None, reply: R) -> list[R]:
        """Check a frame and queue it.

        ``tokens`` is INT32 ``[tokens of the steps]``, ``hidden`` ``[rows, hidden_size]`` in the link dtype
        on every stage but the first. Returns the reply handles of older incarnations' frames that will
        never run, to be ended by the caller. Raises ProtocolError for a late incarnation, a gap in frame
        numbers, or tensors that don't fit the steps; the frame then has no effect.
        """
        self._check_tensors(header, tokens, hidden)
        return self._queue.put(QueuedFrame(header, tokens, hidden, reply, self._clock()))

    def _check_tensors(self, header: FrameHeader, tokens: Tokens, hidden: Hidden | None) -> None:
        info = self._engine.info
        expected = sum(map(protocol.tokens_of, header.steps))
        if tokens.shape != (expected,):
            raise ProtocolError(f"token tensor of shape {tokens.shape} for {expected} tokens")
        if expected and (tokens.min() < 0 or tokens.max() >= info.vocab_size):
            raise ProtocolError(f"token id outside 0..{info.vocab_size - 1}")
        rows = sum(map(protocol.rows_of, header.steps))
        if info.is_first:
            if hidden is not None:
                raise ProtocolError("hidden rows sent to the first stage")
            return
        if rows == 0 and hidden is None:
            return
        dtype = protocol.LINK_DTYPES[info.link_dtype][1]
        if hidden is None or hidden.shape != (rows, info.hidden_size) or hidden.dtype != np.dtype(dtype):
            got = "none" if hidden is None else f"{hidden.dtype}{list(hidden.shape)}"
            raise ProtocolError(f"hidden rows {got}, expected {dtype}[{rows}, {info.hidden_size}]")
        if hidden.nbytes > protocol.MAX_HIDDEN_BYTES:
            raise ProtocolError(f"hidden rows of {hidden.nbytes} bytes, limit {protocol.MAX_HIDDEN_BYTES}")

    # The worker thread.

    def take(self, timeout: float | None = None) -> QueuedFrame[R] | None:
        """The next frame to execute, or None after ``timeout`` seconds without one."""
        return self._queue.take(timeout)

    def wake(self) -> None:
        """Let a waiting ``take`` return early."""
        self._queue.wake()

    def execute(self, frame: QueuedFrame[R]) -> tuple[FrameResult, Hidden | None]:
        """Run a frame that ``take`` gave.

        Returns its result and, from every stage but the last, the hidden rows of the steps that are ok, in
        order: ``[rows, hidden_size]``, None when there are none. Never raises for a fault of a step.
        """
        started = self._clock()
        header = frame.header
        with self._working:
            done = self._executor.run(frame, self._apply_urgent(), self._threads_of(header))
            self._count(done.problem)
        self._queue.done(header)
        compute_us = round((self._clock() - started) * 1e6)
        self._counters.frames += 1
        self._counters.rows += done.rows
        self._counters.busy_us += compute_us
        result = FrameResult(
            incarnation=header.incarnation,
            frame=header.frame,
            statuses=done.statuses,
            queue_us=round((started - frame.accepted_at) * 1e6),
            compute_us=compute_us,
            rows=done.rows,
            drafts_follow=self._head.follow,
        )
        return result, done.hidden

    def draft(self, frame: QueuedFrame[R]) -> DraftResult | None:
        """Behind ``execute``, once its result is on its way: what follows it, or None. Never raises for a fault."""
        header, follows = frame.header, self._head.follow
        with self._working:
            drafts = self._head.draft(self._threads_of(header))
        return (
            DraftResult(incarnation=header.incarnation, frame=header.frame, drafts=drafts)
            if follows
            else None
        )

    def _threads_of(self, header: FrameHeader) -> int:
        return self._threads or max(1, self._cores // max(1, header.busy_stages))

    def _apply_urgent(self) -> Urgent:
        """Free what ended and forget an old incarnation, before any queued work."""
        urgent = self._queue.take_urgent()
        if urgent.reset:
            self._sessions.close_all()
        self._sessions.close(urgent.closing)
        return urgent

    def _count(self, problem: str) -> None:
        """Note for status reports how things are after a frame."""
        self._counters.kv_blocks_used = self._engine.usage().blocks_used
        self._counters.sessions = len(self._sessions)
        self._counters.prefix = self._prefix_status()
        if problem:
            self._counters.last_error = problem

    def _prefix_status(self) -> PrefixStatus:
        activations = self._activations.status()
        return msgspec.structs.replace(
            self._prefixes.status(),
            activation_bytes=activations.bytes,
            activation_hits=activations.hits,
            activation_misses=activations.misses,
        )

    # Any thread.

    def status(self, *, check_integrity: bool = False) -> StageStatus:
        """Who the stage is and how it is; a snapshot, cheap enough for a heartbeat."""
        info = self._engine.info
        return StageStatus(
            name=self._name,
            index=self._index,
            engine=info.engine,
            architecture=info.architecture,
            first_layer=info.first_layer,
            last_layer=info.last_layer,
            n_layers=info.n_layers,
            hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            link_dtype=info.link_dtype,
            kv_block_tokens=info.kv_block_tokens,
            kv_blocks=info.kv_blocks,
            kv_blocks_used=self._counters.kv_blocks_used,
            prefix=self._counters.prefix,
            head=self._head.status(),
            identity=self._identity,
            sessions=self._counters.sessions,
            pending=len(self._queue) + self._working.locked(),
            incarnation=self._queue.incarnation,
            last_frame=self._queue.last_frame,
            frames=self._counters.frames,
            rows=self._counters.rows,
            busy_us=self._counters.busy_us,
            weight_bytes=info.weight_bytes,
            rss_bytes=self._process.memory_info().rss,
            pid=os.getpid(),
            last_error=self._counters.last_error,
            integrity=self._integrity_problem() if check_integrity else "",
        )

    def _integrity_problem(self) -> str:
        if not self._working.acquire(blocking=False):
            return ""
        try:
            self.check_integrity()
        except AssertionError as error:
            return str(error) or "integrity check failed"
        finally:
            self._working.release()
        return ""

    def check_integrity(self) -> None:
        """Raise AssertionError when sessions, engine and prefixes disagree. Call it while the stage is idle."""
        self._sessions.check_integrity()
        assert self._counters.sessions == len(self._sessions), f"{self._counters.sessions} sessions counted"
