"""The runtime of a stage: sessions, alignment, frames in order, a status for every step.

Two threads meet here. The one that receives calls ``accept``: it checks a frame, applies what must not
wait (a new incarnation, ended sessions, live epochs) and queues it. The one worker calls ``execute``: it
owns the engine and runs queued frames in number order. Neither Triton nor torch is known here.

Invariants:

* Frames are executed in the order of their numbers (frame_queue).
* A session's rows are cached for exactly the positions of ``tokens``; ``pos_start`` cuts what is beyond.
* A step fails alone. ``forward`` names the past explicitly, so a batch that fails is run again sequence by
  sequence and only the culprit's step fails.
* A new incarnation leaves nothing of an old one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import psutil

from skippy_stage import protocol
from skippy_stage.engines.base import Batch, Hidden, SequenceRows, StageEngine
from skippy_stage.errors import ErrorCode, ProtocolError, SkippyError
from skippy_stage.frame_queue import FrameQueue, QueuedFrame, Tokens, Urgent
from skippy_stage.protocol import (
    FrameHeader,
    FrameResult,
    OpenStep,
    RowStep,
    SamplingParams,
    StageStatus,
    StepFailed,
    StepOk,
    StepSkipped,
    StepStatus,
    TrimStep,
)
from skippy_stage.sampling import sample_rows

R = TypeVar("R", bound=Hashable)
S = TypeVar("S", bound=np.generic)
Clock = Callable[[], float]

_SKIPPED = StepSkipped()
_OK = StepOk()


@dataclass(slots=True)
class StageSession:
    """What a stage keeps of a session beside its KV: the token of every cached position."""

    max_tokens: int
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    failed_epoch: int = -1
    """Highest epoch that had a failure: its later steps are skipped."""


@dataclass(slots=True)
class _Work:
    """A row step that will run: where its rows are in the frame and in the batch."""

    index: int
    step: RowStep
    rows: SequenceRows
    start: int
    tokens_start: int


@dataclass(slots=True)
class StageCounters:
    """Totals since the stage started, and what the last frame left."""

    kv_blocks_used: int = 0
    sessions: int = 0
    frames: int = 0
    rows: int = 0
    busy_us: int = 0
    last_error: str = ""


class StageRuntime(Generic[R]):
    """Runs the frames of one stage on one engine. ``R`` is whatever answers a frame (a response sender)."""

    def __init__(
        self, engine: StageEngine, name: str, index: int = 0, threads: int = 0, clock: Clock = time.monotonic
    ):
        self._engine = engine
        self._name = name
        self._index = index
        self._threads = threads
        self._cores = len(os.sched_getaffinity(0))
        self._clock = clock
        self._process = psutil.Process()
        self._queue: FrameQueue[R] = FrameQueue()
        self._sessions: dict[int, StageSession] = {}
        self._counters = StageCounters()
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
        statuses: list[StepStatus] = [_SKIPPED] * len(header.steps)
        with self._working:
            urgent = self._apply_urgent()
            work = self._prepare(frame, statuses, urgent)
            hidden = self._run(frame, work, statuses)
            self._counters.kv_blocks_used = self._engine.usage().blocks_used
            self._counters.sessions = len(self._sessions)
        self._queue.done(header)
        rows = sum(item.rows.rows for item in work)
        compute_us = round((self._clock() - started) * 1e6)
        self._counters.frames += 1
        self._counters.rows += rows
        self._counters.busy_us += compute_us
        return (
            FrameResult(
                incarnation=header.incarnation,
                frame=header.frame,
                statuses=tuple(statuses),
                queue_us=round((started - frame.accepted_at) * 1e6),
                compute_us=compute_us,
                rows=rows,
            ),
            hidden,
        )

    def _apply_urgent(self) -> Urgent:
        """Free what ended and forget an old incarnation, before any queued work."""
        urgent = self._queue.take_urgent()
        for session in list(self._sessions) if urgent.reset else urgent.closing & self._sessions.keys():
            self._engine.close(session)
            del self._sessions[session]
        return urgent

    def _prepare(self, frame: QueuedFrame[R], statuses: list[StepStatus], urgent: Urgent) -> list[_Work]:
        work: list[_Work] = []
        if frame.header.incarnation != urgent.incarnation:
            return work
        row = token = 0
        last = self._engine.info.is_last
        for index, step in enumerate(frame.header.steps):
            start, row = row, row + protocol.rows_of(step)
            tokens_start, token = token, token + protocol.tokens_of(step)
            if step.session in urgent.ended:
                continue
            if isinstance(step, OpenStep):
                statuses[index] = self._open(step)
                continue
            session = self._sessions.get(step.session)
            if session is None:
                statuses[index] = StepFailed(
                    code=ErrorCode.INTERNAL, message=f"unknown session {step.session}"
                )
                continue
            if step.epoch < urgent.live_epochs.get(step.session, 0) or step.epoch <= session.failed_epoch:
                continue
            problem = self._align(session, step)
            if problem:
                statuses[index] = self._failed(session, step, problem)
            elif isinstance(step, TrimStep):
                statuses[index] = _OK
            else:
                end = tokens_start + (row - start)
                session.tokens.extend(frame.tokens[tokens_start:end].tolist())
                wanted = protocol.predictions_of(step) if last else 0
                rows = SequenceRows(step.session, step.pos_start, row - start, wanted)
                work.append(_Work(index, step, rows, start, tokens_start))
        return work

    def _open(self, step: OpenStep) -> StepStatus:
        if step.session in self._sessions:
            return StepFailed(code=ErrorCode.INTERNAL, message=f"session {step.session} is open already")
        try:
            self._engine.open(step.session, step.max_tokens)
        except Exception as error:
            return self._fault(error)
        self._sessions[step.session] = StageSession(step.max_tokens, step.sampling)
        return _OK

    def _align(self, session: StageSession, step: RowStep | TrimStep) -> str:
        """Cut the session to the authoritative position; says what is wrong if that can't be."""
        position = step.length if isinstance(step, TrimStep) else step.pos_start
        have = len(session.tokens)
        if position > have:
            return f"session is behind: has {have} positions, the step starts at {position}"
        if position + protocol.rows_of(step) > session.max_tokens:
            end = position + protocol.rows_of(step)
            return f"step ends at {end}, the session has room for {session.max_tokens}"
        del session.tokens[position:]
        return ""

    def _failed(self, session: StageSession, step: RowStep | TrimStep, message: str) -> StepFailed:
        session.failed_epoch = max(session.failed_epoch, step.epoch)
        self._counters.last_error = message
        return StepFailed(code=ErrorCode.INTERNAL, message=message)

    def _fault(self, error: Exception) -> StepFailed:
        message = error.message if isinstance(error, SkippyError) else f"{type(error).__name__}: {error}"
        self._counters.last_error = message
        return StepFailed(code=ErrorCode.INTERNAL, message=message)

    def _run(self, frame: QueuedFrame[R], work: list[_Work], statuses: list[StepStatus]) -> Hidden | None:
        if not work:
            return None
        busy = frame.header.busy_stages
        threads = self._threads or max(1, self._cores // max(1, busy))
        try:
            return self._forward(frame, work, statuses, threads)
        except Exception as error:
            if len(work) == 1:
                self._fail_work(work[0], statuses, error)
                return None
        kept: list[Hidden] = []
        for item in work:
            try:
                hidden = self._forward(frame, [item], statuses, threads)
            except Exception as error:
                self._fail_work(item, statuses, error)
                continue
            if hidden is not None:
                kept.append(hidden)
        return np.concatenate(kept) if kept else None

    def _fail_work(self, item: _Work, statuses: list[StepStatus], error: Exception) -> None:
        session = self._sessions[item.step.session]
        session.failed_epoch = max(session.failed_epoch, item.step.epoch)
        del session.tokens[item.rows.past :]
        statuses[item.index] = self._fault(error)

    def _forward(
        self, frame: QueuedFrame[R], work: list[_Work], statuses: list[StepStatus], threads: int
    ) -> Hidden | None:
        tokens = _gather([frame.tokens[w.tokens_start : w.tokens_start + w.rows.rows] for w in work])
        hidden = None
        if frame.hidden is not None:
            hidden = _gather([frame.hidden[w.start : w.start + w.rows.rows] for w in work], frame.hidden)
        batch = Batch([w.rows for w in work], tokens, hidden)
        output = self._engine.forward(batch, threads=threads)
        row = 0
        for item in work:
            predicted: tuple[int, ...] = ()
            if item.rows.logits:
                if output.logits is None:
                    raise RuntimeError("the engine gave no logits")
                first = item.rows.past + item.rows.rows - item.rows.logits + 1
                sampling = self._sessions[item.step.session].sampling
                predicted = sample_rows(output.logits[row : row + item.rows.logits], sampling, first)
                row += item.rows.logits
            statuses[item.index] = StepOk(tokens=predicted) if predicted else _OK
        return output.hidden

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
        """Raise AssertionError when sessions, engine and queue disagree. Call it while the stage is idle."""
        self._engine.check_integrity()
        cached = self._engine.usage().cached
        assert cached.keys() == self._sessions.keys(), (
            f"engine has {cached.keys()}, runtime {self._sessions.keys()}"
        )
        for name, session in self._sessions.items():
            assert cached[name] >= len(session.tokens), (
                f"session {name}: {cached[name]} cached, {len(session.tokens)} known"
            )
            assert len(session.tokens) <= session.max_tokens, f"session {name} has grown past its room"
        counters = self._counters
        assert counters.sessions == len(self._sessions), f"{counters.sessions} sessions counted"


def _gather(parts: list[npt.NDArray[S]], whole: npt.NDArray[S] | None = None) -> npt.NDArray[S]:
    """Put slices side by side; without a copy when they are the whole array or one slice."""
    if whole is not None and sum(map(len, parts)) == len(whole):
        return whole
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
