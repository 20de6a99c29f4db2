"""A session's decode steps: the decode machine's work as steps of the protocol, and drafts to the work they are for.

Pure, like the session it belongs to. The session alone commits.
"""

from __future__ import annotations

from collections.abc import Sequence

from skippy_stage.protocol import DecodeStep, Draft, RowStep, StepOk, VerifyStep

from skippy_orchestrator.speculation.counters import SpeculationCounters
from skippy_orchestrator.speculation.machine import DecodeMachine
from skippy_orchestrator.speculation.work import Answer, Path


class SessionDecoding:
    """Decoding of one session, from its first token on."""

    def __init__(self, session: int, machine: DecodeMachine) -> None:
        self._session = session
        self._machine = machine
        self._awaited: tuple[int, int] | None = None
        """Epoch and position of the step whose draft of the head is waited for."""
        self.inputs: Sequence[int] = ()
        """Tokens of the step that ``next_step`` gave last."""

    @property
    def counters(self) -> SpeculationCounters:
        """What came of guessing ahead."""
        return self._machine.counters

    @property
    def wanted_drafts(self) -> int:
        """Tokens that the draft model is to draft behind the text before there is a next step; 0 for none."""
        return self._machine.wanted_drafts()

    def wants_step(self, *, in_flight: bool) -> bool:
        """Whether a step could be sent now, as far as is known without asking."""
        return self._machine.may_send if in_flight else not self._machine.awaits_drafts

    def next_step(self, epoch: int, room: int, now: float) -> RowStep | None:
        """The next step, of at most ``room`` rows, or None. It counts as sent."""
        work = self._machine.next(now) if room >= self._machine.most_rows else None
        if work is None:
            return None
        self.inputs = work.inputs
        if work.path is Path.SERIAL:
            return DecodeStep(session=self._session, epoch=epoch, pos_start=work.pos_start)
        return VerifyStep(
            session=self._session,
            epoch=epoch,
            pos_start=work.pos_start,
            rows=len(work.inputs),
            window=work.window,
        )

    def answered(self, status: StepOk | None, now: float, *, drafts_follow: bool) -> Answer:
        """The oldest step has come back, None for a stale one that was not executed; see DecodeMachine.answered."""
        predicted = status.tokens if status is not None else ()
        late = drafts_follow and status is not None
        return self._machine.answered(predicted, None if late else (), now)

    def settle(self, step: RowStep, answer: Answer, committed: int, *, stopped: bool) -> bool:
        """So many tokens of the answer to ``step`` are committed; whether windows in flight have become stale."""
        stale = self._machine.settle(answer, committed, stopped=stopped)
        if self._machine.awaits_head and self._awaited is None:
            self._awaited = step.epoch, step.pos_start
        return stale

    def drafted(self, draft: Draft, length: int, now: float) -> None:
        """The head's draft behind a step, the text having ``length`` tokens; others than the awaited are of no use."""
        if (draft.epoch, draft.pos_start) != self._awaited:
            return
        self._awaited = None
        # A plan's threshold may have committed less than the stage found right.
        self._machine.drafted(draft.tokens if draft.position == length else (), now)

    def proposed(self, drafts: Sequence[int], now: float) -> None:
        """What the draft model expects behind the text; nothing when it has failed."""
        if self.wanted_drafts:
            self._machine.proposed(drafts, now)

    def lose_draft_model(self) -> None:
        """There is no draft model any more."""
        self._machine.sources.draft_model_lost()
