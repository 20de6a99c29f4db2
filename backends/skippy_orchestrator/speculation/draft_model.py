"""Sessions of the draft model: what its stage computes next, and what became of it (spec 7.3).

Pure. The draft model is a stage with all layers of a small model and its own sessions, one for each request
that a draft model drafts for. A frame holds one step of every session that has work, so all of them draft in one
batch, and one step makes all tokens of a proposal.

Invariants:

* A session has one step in flight at most. What the stage holds of it is ``text[:base]`` and then ``tail``, drafts
  that the target may not take; every step says where it starts, which cuts what is wrong.
* ``want`` is answered once: at once, or by the frame that brings the drafts, or with no drafts when the session
  has none to expect any more.
* Nothing here can fail a request: a session whose step failed drafts no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from skippy_stage.protocol import (
    MAX_DRAFTS,
    Control,
    OpenStep,
    PrefillStep,
    ProposeStep,
    SamplingParams,
    Step,
    StepOk,
    StepStatus,
    StopStep,
    positions_of,
)

from skippy_orchestrator.frames import Frame
from skippy_orchestrator.kv_budget import KvBudget

_EPOCH: Final = 0
"""Drafts are cut by position; a failed session ends."""


@dataclass(slots=True)
class Proposal:
    """Drafts behind a text of ``length`` tokens with ``assumed`` drafts behind it."""

    length: int
    assumed: tuple[int, ...]
    drafts: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class DraftSession:
    """What the pool knows of one session."""

    id: int
    text: Sequence[int]
    """The request's own list: prompt and committed tokens."""
    max_positions: int
    sampling: SamplingParams
    opened: bool = False
    busy: bool = False
    wanted: int = 0
    base: int = 0
    tail: tuple[int, ...] = ()
    asked: Proposal | None = None
    """What is in flight."""
    latest: Proposal | None = None
    """What came last: a proposal ahead of the text goes on from it, or is it."""


@dataclass(slots=True)
class DraftCounters:
    """Totals of the draft model since the start."""

    sessions: int = 0
    refused: int = 0
    """Sessions that there was no room for: they decode without drafts."""
    failed: int = 0
    """Sessions whose step failed."""
    proposals: int = 0
    drafts: int = 0
    ahead_used: int = 0
    """Proposals that were there before they were asked for."""
    ahead_wasted: int = 0
    frames: int = 0


@dataclass(frozen=True, slots=True)
class Drafted:
    """The answer to a session's ``want``."""

    session: int
    tokens: tuple[int, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What the draft stage, the target and the scheduler allow."""

    context_tokens: int
    """Of the draft model."""
    vocab_size: int
    """Of the target: a draft model with more tokens may draft some that the target does not have."""
    max_frame_rows: int
    prefill_rows: int = 0
    """Rows of prompts in a frame that somebody's drafts wait for; 0 is no limit."""


class DraftPool:
    """All sessions of a draft stage, for one incarnation of its pipeline."""

    def __init__(
        self,
        budget: KvBudget,
        limits: DraftLimits,
        counters: DraftCounters,
        *,
        ahead: bool,
    ) -> None:
        """``ahead``: the next proposal is made while the target verifies the last one, as if all of it was right."""
        self.counters = counters
        self._budget = budget
        self._limits = limits
        self._ahead = ahead
        self._sessions: dict[int, DraftSession] = {}
        self._closing: list[Control] = []
        self._frame: Frame | None = None
        self._number = 0

    @property
    def idle(self) -> bool:
        """Whether there are no sessions, and nothing is in flight or waits to be said."""
        return not (self._sessions or self._closing or self._frame)

    def open(self, session: int, text: Sequence[int], max_positions: int, sampling: SamplingParams) -> bool:
        """A request begins; False when there is no room for it, or its text may outgrow the model's context."""
        if max_positions > self._limits.context_tokens or not self._budget.reserve(session, max_positions):
            self.counters.refused += 1
            return False
        self.counters.sessions += 1
        self._sessions[session] = DraftSession(session, text, max_positions, sampling)
        return True

    def close(self, session: int) -> None:
        """A request has ended; unknown ones are ignored."""
        closed = self._sessions.pop(session, None)
        if closed is None:
            return
        self._budget.release(session)
        self._drop_ahead(closed)
        if closed.opened:
            self._closing.append(StopStep(session=session))

    def want(self, session: int, drafts: int) -> Drafted | None:
        """Drafts behind the text as it is now; None when a frame will bring them."""
        state = self._sessions.get(session)
        if state is None:
            return Drafted(session)
        state.wanted = min(drafts, MAX_DRAFTS)
        return None if state.busy else self._ready(state)

    def next_frame(self) -> Frame | None:
        """The next frame, or None while one is in flight or there is nothing to do."""
        if self._frame is not None:
            return None
        steps: list[Step] = list(self._closing)
        tokens: list[int] = []
        room, prompts = self._limits.max_frame_rows, self._limits.prefill_rows
        waited_for = False
        for state in self._by_need():
            found = self._step(state, min(room, prompts) if waited_for and prompts else room)
            if found is None:
                continue
            step, inputs = found
            waited_for |= state.wanted > 0 and isinstance(step, ProposeStep)
            if not state.opened:
                state.opened = True
                steps.append(
                    OpenStep(session=state.id, max_tokens=state.max_positions, sampling=state.sampling)
                )
            state.busy = True
            steps.append(step)
            tokens += inputs
            room -= positions_of(step)
            prompts -= positions_of(step) if isinstance(step, PrefillStep) else 0
        if not steps:
            return None
        self._closing.clear()
        self._number += 1
        self.counters.frames += 1
        self._frame = Frame(self._number, tuple(steps), tuple(tokens), ())
        return self._frame

    def frame_done(self, number: int, statuses: Sequence[StepStatus]) -> list[Drafted]:
        """The frame has come back; returns the drafts that sessions wait for. Raises ValueError for another frame."""
        frame, self._frame = self._frame, None
        if frame is None or frame.number != number:
            raise ValueError(f"frame {number} of the draft model came back unasked")
        ready: list[Drafted] = []
        broken: list[int] = []
        for step, status in zip(frame.steps, statuses, strict=True):
            state = self._sessions.get(step.session)
            if state is None:
                continue
            if not isinstance(status, StepOk):
                broken.append(step.session)
            elif isinstance(step, PrefillStep | ProposeStep):
                state.busy = False
                self._note(state, status)
                drafted = self._ready(state)
                if drafted is not None:
                    ready.append(drafted)
        for session in dict.fromkeys(broken):
            self.counters.failed += 1
            if self._sessions[session].wanted:
                ready.append(Drafted(session))
            self.close(session)
        return ready

    def lose(self) -> list[Drafted]:
        """The stage is gone: answers for all that wait; the pool is of no use afterwards."""
        waiting = [Drafted(state.id) for state in self._sessions.values() if state.wanted]
        for session in list(self._sessions):
            self.close(session)
        self._closing.clear()
        self._frame = None
        return waiting

    def _by_need(self) -> list[DraftSession]:
        """Sessions that could have a step: those that are waited for first, then prompts, then work ahead."""
        idle = [state for state in self._sessions.values() if not state.busy]
        return sorted(idle, key=lambda state: not state.wanted)

    def _step(self, state: DraftSession, room: int) -> tuple[Step, Sequence[int]] | None:
        """A session's next step of at most ``room`` positions, with its token ids."""
        start, end = self._held(state), len(state.text)
        if room < 1:
            return None
        if end - start > 1 and (not state.wanted or end - start + state.wanted - 1 > room):
            # The current token is left for the proposal, which needs a row.
            rows = min(end - 1 - start, room)
            state.base, state.tail, state.asked = start + rows, (), None
            step = PrefillStep(session=state.id, epoch=_EPOCH, pos_start=start, rows=rows)
            return step, state.text[start : start + rows]
        if state.wanted:
            if end - start + state.wanted - 1 > room:
                return None
            return self._propose(state, start, (), state.wanted)
        latest = state.latest
        if not self._ahead or latest is None or latest.assumed or latest.length != end:
            return None
        count = len(latest.drafts)
        if not count or count > room or end + 2 * count - 1 > state.max_positions:
            return None
        return self._propose(state, end + count - 1, latest.drafts, count)

    def _propose(
        self, state: DraftSession, start: int, assumed: tuple[int, ...], drafts: int
    ) -> tuple[Step, Sequence[int]]:
        end = len(state.text)
        inputs = assumed[-1:] if assumed else state.text[start:end]
        state.asked = Proposal(end, assumed)
        state.base, state.tail = end, assumed[:-1]
        step = ProposeStep(session=state.id, epoch=_EPOCH, pos_start=start, rows=len(inputs), drafts=drafts)
        return step, inputs

    def _held(self, state: DraftSession) -> int:
        """Positions of the text that the stage holds, the last one left out: a proposal needs a row."""
        text, held = state.text, state.base
        for token in state.tail:
            if held >= len(text) or text[held] != token:
                break
            held += 1
        return min(held, len(text) - 1)

    def _note(self, state: DraftSession, status: StepOk) -> None:
        """A step has come back: the stage holds its rows, and all drafts but the last."""
        asked, state.asked = state.asked, None
        if asked is None:
            return
        self.counters.proposals += 1
        self.counters.drafts += len(status.tokens)
        unknown = (i for i, token in enumerate(status.tokens) if token >= self._limits.vocab_size)
        asked.drafts = status.tokens[: next(unknown, None)]
        state.tail = (*asked.assumed, *status.tokens[:-1])
        self._drop_ahead(state)
        state.latest = asked

    def _ready(self, state: DraftSession) -> Drafted | None:
        """The answer to what is wanted, if the latest proposal continues the text."""
        latest = state.latest
        if not state.wanted or latest is None:
            return None
        if tuple(state.text[latest.length :]) != latest.assumed:
            self._drop_ahead(state)
            state.latest = None
            return None
        self.counters.ahead_used += bool(latest.assumed)
        wanted, state.wanted = state.wanted, 0
        drafts = latest.drafts[:wanted]
        # What is given out is what the next proposal ahead assumes.
        state.latest = Proposal(len(state.text), (), drafts) if len(drafts) == len(latest.drafts) else None
        return Drafted(state.id, drafts)

    def _drop_ahead(self, state: DraftSession) -> None:
        self.counters.ahead_wasted += state.latest is not None and bool(state.latest.assumed)

    def check_integrity(self, running: set[int]) -> None:
        """Raise AssertionError when sessions, reservations and what is in flight disagree."""
        self._budget.check_integrity(set(self._sessions))
        assert self._sessions.keys() <= running, "a draft session has outlived its request"
        stepping = {
            step.session
            for step in (self._frame.steps if self._frame else ())
            if isinstance(step, PrefillStep | ProposeStep)
        }
        for state in self._sessions.values():
            assert state.busy <= (state.id in stepping), f"session {state.id} waits for nothing"
            assert state.base <= len(state.text), f"session {state.id} holds more than there is"
