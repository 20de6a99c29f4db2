"""The core: all sessions of a deployment, as one pure object.

Events and a time in, frames and outputs out. One thread drives it (service.py); tests drive it in virtual
time against scripted stages. Nothing here knows Triton, torch, threads or clocks.

Frames leave in the order of their numbers and complete in that order. Whatever ends a session (its last
token, a cancel, a failure) goes through ``_retire``: the one place that gives back its KV reservation,
its place and its turn, and puts its stop into the next frame.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from skippy_stage.errors import Cancelled, SkippyError
from skippy_stage.protocol import (
    OpenStep,
    PrefillStep,
    RowStep,
    Step,
    StepFailed,
    StepOk,
    StepStatus,
)

from skippy_orchestrator.admission import Admission
from skippy_orchestrator.deployment import LimitsSection, PrefillSection, SchedulerSection
from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.prefill import FixedChunks
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.scheduler import Scheduler
from skippy_orchestrator.sessions import Commit, Session, Text


@dataclass(frozen=True, slots=True)
class Frame:
    """Steps of many sessions that travel the pipeline together."""

    number: int
    steps: tuple[Step, ...]
    tokens: tuple[int, ...]
    """Token ids of the row steps, in order."""
    ended: tuple[int, ...]
    live_epochs: tuple[tuple[int, int], ...] = ()
    decodes: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A session that ended with an error."""

    session: int
    error: SkippyError


Output: TypeAlias = Commit | Failure


@dataclass(slots=True)
class CoreCounters:
    """Totals since the start."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    frames: int = 0


class Core:
    """Sessions, admission and scheduling of one pipeline incarnation."""

    def __init__(
        self,
        stages: int,
        budget: KvBudget,
        end_tokens: frozenset[int],
        scheduler: SchedulerSection,
        prefill: PrefillSection,
        limits: LimitsSection,
        counters: CoreCounters | None = None,
    ) -> None:
        self.counters = counters or CoreCounters()
        self._frames_per_link = scheduler.frames_per_link
        self._max_frames = stages + scheduler.frames_per_link - 1
        self._end_tokens = end_tokens
        self._policy = FixedChunks(prefill.chunk_tokens)
        self._credits = prefill.credits
        self._admission = Admission(budget, scheduler.max_sessions, limits.max_queue, limits.queue_timeout_s)
        self._scheduler = Scheduler(scheduler, prefill.chunk_tokens, stages)
        self._running: dict[int, Session] = {}
        self._ended: list[int] = []
        self._outputs: list[Output] = []
        self._in_flight: OrderedDict[int, Frame] = OrderedDict()
        self._at_stage_0 = 0
        self._number = 0
        self._announced = False

    @property
    def active(self) -> int:
        """Sessions that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return self._admission.waiting

    @property
    def idle(self) -> bool:
        """True when nothing runs, waits or is in flight, and no stop waits to be sent."""
        return not (self._running or self.waiting or self._in_flight or self._ended)

    # Events.

    def submit(self, session: int, request: GenerationRequest, text: Text, now: float) -> None:
        """A request has come in; raises InvalidArgument or Unavailable when it is refused."""
        new = Session(session, request, text, self._end_tokens, self._policy, self._credits)
        admitted = self._admission.submit(new, now)
        self.counters.requests += 1
        self._start(admitted)

    def cancel(self, session: int) -> None:
        """The client wants no more; unknown sessions (just finished) are ignored."""
        if self._admission.withdraw(session):
            self._fail(session, Cancelled("cancelled by the client"))
            self._start(self._admission.admit())
        elif session in self._running:
            self._retire(self._running[session], Cancelled("cancelled by the client"))

    def frame_left_first_stage(self, number: int) -> None:
        """The oldest frame at stage 0 has left it: its place and its chunks' credits return."""
        self._at_stage_0 -= 1
        for step in self._in_flight[number].steps:
            session = self._running.get(step.session)
            if session is not None and isinstance(step, RowStep):
                session.left_first_stage(step)

    def frame_done(self, number: int, statuses: Sequence[StepStatus]) -> None:
        """The oldest frame has left the pipeline: one status per step, failures naming the stage."""
        frame = self._in_flight.pop(number)
        for step, status in zip(frame.steps, statuses, strict=True):
            session = self._running.get(step.session)
            if session is None:
                continue
            if isinstance(status, StepFailed):
                self._retire(session, SkippyError(status.message))
            elif not isinstance(status, StepOk):
                self._retire(session, SkippyError("a live step was skipped by a stage"))
            elif isinstance(step, RowStep):
                self._complete(session, step, status.tokens)

    def fail_all(self, error: SkippyError, waiting_error: SkippyError | None = None) -> None:
        """The pipeline is gone, or the server stops: every session ends with the error."""
        for waiting in self._admission.withdraw_all():
            self._fail(waiting, waiting_error or error)
        for session in list(self._running.values()):
            self._retire(session, error)

    def tick(self, now: float) -> None:
        """Time has passed: requests that waited too long are refused."""
        expired = self._admission.expire(now)
        for session, error in expired:
            self._fail(session, error)
        if expired:
            self._start(self._admission.admit())

    # Steps and outputs.

    def next_frame(self) -> Frame | None:
        """Build the next frame if stage 0 has a place and there is something to send."""
        if self._at_stage_0 >= self._frames_per_link or len(self._in_flight) >= self._max_frames:
            return None
        picks = self._scheduler.pick(sum(frame.decodes for frame in self._in_flight.values()))
        # The first frame leaves at once, with nothing in it: it frees what an older incarnation left on the stages.
        if self._announced and not picks and not self._ended:
            return None
        self._announced = True
        steps: list[Step] = []
        tokens: list[int] = []
        decodes = False
        for session, step in picks:
            opening, ids = session.dispatch(step)
            if opening is not None:
                steps.append(opening)
            steps.append(step)
            tokens.extend(ids)
            decodes = decodes or not isinstance(step, PrefillStep)
            self._scheduler.dispatched(session)
        self._number += 1
        frame = Frame(self._number, tuple(steps), tuple(tokens), tuple(self._ended), decodes=decodes)
        self._ended.clear()
        self._in_flight[frame.number] = frame
        self._at_stage_0 += 1
        self.counters.frames += 1
        return frame

    def take_outputs(self) -> list[Output]:
        """What has happened to sessions since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # The two ends of a session.

    def _start(self, admitted: Sequence[Session]) -> None:
        for session in admitted:
            self._running[session.id] = session
            self._scheduler.add(session)

    def _retire(self, session: Session, error: SkippyError | None = None) -> None:
        session.end()
        del self._running[session.id]
        self._scheduler.remove(session)
        self._admission.release(session)
        if session.on_stages:
            self._ended.append(session.id)
        if error is not None:
            self._fail(session.id, error)
        self._start(self._admission.admit())

    def _fail(self, session: int, error: SkippyError) -> None:
        if isinstance(error, Cancelled):
            self.counters.cancelled += 1
        else:
            self.counters.failed += 1
        self._outputs.append(Failure(session, error))

    def _complete(self, session: Session, step: RowStep, tokens: Sequence[int]) -> None:
        commit = session.complete(step, tokens)
        if commit is not None:
            self._outputs.append(commit)
            self.counters.output_tokens += len(commit.tokens)
            if commit.finish_reason:
                self.counters.finished += 1
                self.counters.prompt_tokens += session.n_prompt
                self._retire(session)
                return
        self._scheduler.update(session)

    def check_integrity(self) -> None:
        """Raise AssertionError when sessions, places, reservations and frames disagree."""
        self._admission.check_integrity(set(self._running))
        self._scheduler.check_integrity(self._running)
        for session in self._running.values():
            session.check_integrity()
        assert 0 <= self._at_stage_0 <= len(self._in_flight), "more frames at stage 0 than in flight"
        in_frames = [
            s.session for f in self._in_flight.values() for s in f.steps if not isinstance(s, OpenStep)
        ]
        for name, session in self._running.items():
            assert in_frames.count(name) == session.steps_in_flight, f"session {name} has lost a step"
