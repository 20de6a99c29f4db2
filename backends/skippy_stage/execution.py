"""Executing one frame: its steps in order, the rows of all sessions as one batch.

Invariants:

* Steps of a session apply in their order. Controls that come before a session's rows apply before the
  batch, those that come after them apply behind it.
* A step fails alone. ``forward`` names the past explicitly, so a batch that fails is run again sequence by
  sequence and only the culprit's step fails; later steps of the same session and epoch are skipped.
* What the batch gave is shown to the MTP head of a last stage, which drafts behind the frame's result.
* Proposals of a frame draft together: behind the batch come rounds of one row for each that wants more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from skippy_stage import protocol
from skippy_stage.drafting import HeadDrafts
from skippy_stage.engines.base import Batch, Hidden, SequenceRows, StageEngine
from skippy_stage.errors import ErrorCode, SkippyError
from skippy_stage.frame_queue import QueuedFrame, Tokens, Urgent
from skippy_stage.prefix.activations import ActivationCache
from skippy_stage.protocol import (
    OpenStep,
    PrefillStep,
    ProposeStep,
    RowStep,
    Step,
    StepFailed,
    StepOk,
    StepSkipped,
    StepStatus,
    StopStep,
)
from skippy_stage.sampling import sample_rows
from skippy_stage.sessions import SessionTable, StageSession

R = TypeVar("R", bound=Hashable)
S = TypeVar("S", bound=np.generic)

_SKIPPED = StepSkipped()
_OK = StepOk()


@dataclass(slots=True)
class _Work:
    """A row step that will run: where its rows are in the frame and in the batch."""

    index: int
    step: RowStep
    rows: SequenceRows
    start: int
    tokens: Tokens
    lookahead: Tokens
    known: Hidden | None = None
    """Its rows' output where that needs no computing (spec 4.9)."""
    drafted: tuple[int, ...] = ()
    """What a proposal has drafted before ``rows``."""


@dataclass(frozen=True, slots=True)
class Executed:
    """What became of a frame."""

    statuses: tuple[StepStatus, ...]
    hidden: Hidden | None
    """Rows of the row steps that are ok, in order; None on the last stage and when there are none."""
    rows: int
    """Rows that were asked for by steps that could start."""
    problem: str
    """The last failure's message, or empty."""


class FrameExecutor(Generic[R]):
    """Runs frames on an engine. Not thread-safe: the stage's worker owns it."""

    def __init__(
        self, engine: StageEngine, sessions: SessionTable, activations: ActivationCache, head: HeadDrafts
    ) -> None:
        self._head = head
        self._engine = engine
        self._sessions = sessions
        self._activations = activations
        self._caches_activations = engine.info.is_first and not engine.info.is_last
        self._problem = ""

    def run(self, frame: QueuedFrame[R], urgent: Urgent, threads: int) -> Executed:
        """Execute a frame; never raises for a fault of a step."""
        self._problem = ""
        self._head.begin_frame()
        statuses: list[StepStatus] = [_SKIPPED] * len(frame.header.steps)
        work: list[_Work] = []
        hidden: Hidden | None = None
        if frame.header.incarnation == urgent.incarnation:
            late = self._prepare(frame, urgent, statuses, work)
            hidden = self._compute(frame, work, statuses, threads)
            self._draft(frame, work, statuses, threads)
            for index, step in late:
                statuses[index] = self._control(step, (), urgent)
        rows = sum(protocol.positions_of(item.step) for item in work)
        return Executed(tuple(statuses), hidden, rows, self._problem)

    def _prepare(
        self, frame: QueuedFrame[R], urgent: Urgent, statuses: list[StepStatus], work: list[_Work]
    ) -> list[tuple[int, Step]]:
        """Apply what comes before the batch, line up its rows, and return the controls that come after."""
        late: list[tuple[int, Step]] = []
        with_rows: set[int] = set()
        row = token = 0
        for index, step in enumerate(frame.header.steps):
            rows = protocol.rows_of(step)
            start, row = row, row + rows
            tokens_start, token = token, token + protocol.tokens_of(step)
            if step.session in with_rows:
                late.append((index, step))
            elif not isinstance(step, RowStep):
                statuses[index] = self._control(step, frame.tokens[tokens_start:token].tolist(), urgent)
            else:
                status = self._blocked(step, urgent)
                if status is None:
                    with_rows.add(step.session)
                    share = SequenceRows(step.session, step.pos_start, rows)
                    tokens = frame.tokens[tokens_start:token]
                    status = self._start(_Work(index, step, share, start, tokens[:rows], tokens[rows:]), work)
                statuses[index] = status
        return late

    def _blocked(self, step: Step, urgent: Urgent) -> StepStatus | None:
        """Why a step does not run at all, or None."""
        if step.session in urgent.ended:
            return _SKIPPED
        if isinstance(step, OpenStep):
            return None
        session = self._sessions.get(step.session)
        if session is None:
            return self._failure(f"unknown session {step.session}")
        if isinstance(step, StopStep):
            return None
        lowest = urgent.live_epochs.get(step.session, 0)
        return _SKIPPED if step.epoch < lowest or step.epoch <= session.failed_epoch else None

    def _control(self, step: Step, tokens: Sequence[int], urgent: Urgent) -> StepStatus:
        blocked = self._blocked(step, urgent)
        if blocked is not None:
            return blocked
        try:
            return self._sessions.control(step, tokens)
        except Exception as error:
            return self._failed(step, error)

    def _start(self, item: _Work, work: list[_Work]) -> StepStatus:
        """Line up a row step; its status is decided by the batch."""
        step, info, tokens = item.step, self._engine.info, item.tokens.tolist()
        try:
            if isinstance(step, ProposeStep) and not (info.is_first and info.is_last):
                held = f"{info.first_layer} to {info.last_layer} of {info.n_layers}"
                raise SkippyError(f"propose: the stage holds layers {held}, expected the whole model")
            if self._caches_activations and isinstance(step, PrefillStep) and step.pos_start == 0:
                item.known = self._known_rows(step.session, tokens)
            if item.known is None:
                self._sessions.align(step).tokens.extend(tokens)
        except Exception as error:
            return self._failed(step, error)
        if info.is_last:
            item.rows = replace(item.rows, logits=protocol.predictions_of(step))
        work.append(item)
        return _SKIPPED

    def _known_rows(self, name: int, tokens: list[int]) -> Hidden | None:
        """Output rows of a first chunk that was computed before, its KV restored (spec 4.9)."""
        session = self._sessions.get(name)
        if session is None or session.tokens:
            return None
        known = self._activations.find(session.namespace, tokens)
        if known is None:
            return None
        restored = self._sessions.start_from(name, tokens)
        self._activations.restored(restored, len(tokens))
        return known if restored == len(tokens) else None

    def _compute(
        self, frame: QueuedFrame[R], work: list[_Work], statuses: list[StepStatus], threads: int
    ) -> Hidden | None:
        computed = [item for item in work if item.known is None]
        parts: dict[int, Hidden] = {item.index: item.known for item in work if item.known is not None}
        for index in parts:
            statuses[index] = _OK
        whole = self._run_rows(frame, computed, statuses, threads, parts) if computed else None
        ordered = [parts[item.index] for item in work if item.index in parts]
        return _joined(ordered, whole) if ordered else None

    def _draft(
        self, frame: QueuedFrame[R], work: list[_Work], statuses: list[StepStatus], threads: int
    ) -> None:
        """Let the proposals decode on from their drafts, one row each per round, until none wants more."""
        while work := [item for item in work if self._feed(item, statuses[item.index])]:
            self._run_rows(frame, work, statuses, threads, {})

    def _feed(self, item: _Work, status: StepStatus) -> bool:
        """Make the latest draft of a proposal its next row; False when it is done or has failed."""
        step, rows = item.step, item.rows
        if not isinstance(step, ProposeStep) or not isinstance(status, StepOk):
            return False
        if len(status.tokens) == step.drafts:
            return False
        item.drafted = status.tokens
        item.rows = SequenceRows(step.session, rows.past + rows.rows, 1, 1)
        item.tokens = np.array(status.tokens[-1:], np.int32)
        self._session(item).tokens.append(status.tokens[-1])
        return True

    def _run_rows(
        self,
        frame: QueuedFrame[R],
        work: list[_Work],
        statuses: list[StepStatus],
        threads: int,
        parts: dict[int, Hidden],
    ) -> Hidden | None:
        """Run the batch; returns its rows as one array where one batch gave them all."""
        try:
            return self._forward(frame, work, statuses, threads, parts)
        except Exception as error:
            if len(work) == 1:
                del self._session(work[0]).tokens[work[0].step.pos_start :]
                statuses[work[0].index] = self._failed(work[0].step, error)
                return None
        for item in work:
            self._run_rows(frame, [item], statuses, threads, parts)
        return None

    def _forward(
        self,
        frame: QueuedFrame[R],
        work: list[_Work],
        statuses: list[StepStatus],
        threads: int,
        parts: dict[int, Hidden],
    ) -> Hidden | None:
        tokens = _joined([w.tokens for w in work])
        hidden = None
        if frame.hidden is not None:
            hidden = _joined([frame.hidden[w.start : w.start + w.rows.rows] for w in work], frame.hidden)
        self._head.begin_batch()
        output = self._engine.forward(Batch([w.rows for w in work], tokens, hidden), threads=threads)
        start = logit = 0
        for item in work:
            predicted: tuple[int, ...] = ()
            if item.rows.logits:
                if output.logits is None:
                    raise RuntimeError("the engine gave no logits")
                first = item.rows.past + item.rows.rows - item.rows.logits + 1
                sampling = self._session(item).sampling
                predicted = sample_rows(output.logits[logit : logit + item.rows.logits], sampling, first)
                logit += item.rows.logits
            self._head.saw(item.step, start, item.tokens, item.lookahead, predicted)
            statuses[item.index] = StepOk(tokens=item.drafted + predicted) if predicted else _OK
            if output.hidden is not None:
                parts[item.index] = output.hidden[start : start + item.rows.rows]
                self._keep_activation(item, parts[item.index])
            start += item.rows.rows
        return output.hidden

    def _keep_activation(self, item: _Work, hidden: Hidden) -> None:
        if self._caches_activations and isinstance(item.step, PrefillStep) and item.step.pos_start == 0:
            session = self._session(item)
            self._activations.record(session.namespace, session.tokens[: item.rows.rows], hidden)

    def _session(self, item: _Work) -> StageSession:
        session = self._sessions.get(item.step.session)
        if session is None:
            raise RuntimeError(f"session {item.step.session} was freed while its rows ran")
        return session

    def _failed(self, step: Step, error: Exception) -> StepFailed:
        session = self._sessions.get(step.session)
        if session is not None and not isinstance(step, OpenStep | StopStep):
            session.failed_epoch = max(session.failed_epoch, step.epoch)
        return self._failure(
            error.message if isinstance(error, SkippyError) else f"{type(error).__name__}: {error}"
        )

    def _failure(self, message: str) -> StepFailed:
        self._problem = message
        return StepFailed(code=ErrorCode.INTERNAL, message=message)


def _joined(parts: list[npt.NDArray[S]], whole: npt.NDArray[S] | None = None) -> npt.NDArray[S]:
    """Put slices side by side; without a copy when they are the whole array or one slice."""
    if whole is not None and sum(map(len, parts)) == len(whole):
        return whole
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
