"""The core: all sessions of a deployment, as one pure object.

Events and a time in, frames and outputs out. One thread drives it (service.py); tests drive it in virtual
time against scripted stages. Nothing here knows Triton, torch, threads or clocks.

Frames leave in the order of their numbers and complete in that order. Whatever ends a session (its last
token, a cancel, a failure) goes through ``_retire``: the one place that gives back its KV reservation,
its place and its turn, and puts its end into the next frame: in order behind its own steps when it has
finished, ahead of all queued work when it was broken off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from skippy_stage.errors import Cancelled, SkippyError
from skippy_stage.protocol import (
    Control,
    DecodeStep,
    Draft,
    PrefillStep,
    ProbeStep,
    RecordStep,
    Step,
    StepFailed,
    StepOk,
    StepStatus,
    VerifyStep,
)

from skippy_orchestrator.admission import Admission
from skippy_orchestrator.deployment import LimitsSection, PrefillSection, SchedulerSection
from skippy_orchestrator.frames import Frame, StageReport
from skippy_orchestrator.history import History
from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.prefill import PrefillPolicy, PrefillTerms
from skippy_orchestrator.prefix.cache import PrefixCache
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.scheduler import Scheduler
from skippy_orchestrator.sessions import Commit, Session, SessionStep, Text
from skippy_orchestrator.speculation.draft_model import Drafted, DraftPool


@dataclass(frozen=True, slots=True)
class Failure:
    """A session that ended with an error."""

    session: int
    error: SkippyError


Output: TypeAlias = Commit | Failure


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
        prefixes: PrefixCache,
        history: History,
    ) -> None:
        self.history = history
        self.counters = history.counters
        self._stages = stages
        self._frames_per_link = scheduler.frames_per_link
        self._max_frames = stages + scheduler.frames_per_link - 1
        self._end_tokens = end_tokens
        self._prefill = PrefillTerms(PrefillPolicy.of(prefill), prefill.credits, history.transport)
        self._prefixes = prefixes
        self._drafts: DraftPool | None = None
        self._budget = budget
        self._admission = Admission(budget, scheduler.max_sessions, limits.max_queue, limits.queue_timeout_s)
        self._scheduler = Scheduler(scheduler, stages)
        self._running: dict[int, Session] = {}
        self._closing: list[Control] = []
        self._ended: list[int] = []
        self._live_epochs: dict[int, int] = {}
        """Of sessions whose older steps no longer count: to be said in the next frame."""
        self._outputs: list[Output] = []
        self._in_flight: OrderedDict[int, Frame] = OrderedDict()
        self._left_first = 0
        self._left_second = 0
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
        """True when nothing runs, waits or is in flight, and no end waits to be sent."""
        drafts = self._drafts is not None and not self._drafts.idle
        return not (
            self._running or self.waiting or self._in_flight or self._ended or self._closing or drafts
        )

    # Events.

    def submit(self, session: int, request: GenerationRequest, text: Text, now: float) -> None:
        """A request has come in; raises InvalidArgument or Unavailable when it is refused."""
        new = Session(session, request, text, self._end_tokens, self._prefill)
        admitted = self._admission.submit(new, now)
        self.counters.requests += 1
        self._start(admitted, now)

    def cancel(self, session: int, now: float) -> None:
        """The client wants no more; unknown sessions (just finished) are ignored."""
        if self._admission.withdraw(session):
            self._fail(session, Cancelled("cancelled by the client"))
            self._start(self._admission.admit(), now)
        elif session in self._running:
            self._retire(self._running[session], now, Cancelled("cancelled by the client"))

    def frame_left_stage(self, number: int, stage: int, report: StageReport, now: float) -> None:
        """The oldest frame at a stage that is not the last has left it."""
        self._observe(self._in_flight[number], stage, report)
        self._note_left(number, stage, now)

    def frame_done(
        self,
        number: int,
        statuses: Sequence[StepStatus],
        report: StageReport,
        now: float,
        *,
        drafts_follow: bool = False,
    ) -> None:
        """The oldest frame has left the last stage: one status per step, failures naming the stage.

        ``drafts_follow``: ``frame_drafted`` comes for every session with a prediction that drafts natively.
        """
        frame = self._in_flight[number]
        self._observe(frame, self._stages - 1, report)
        self._note_left(number, self._stages - 1, now)
        del self._in_flight[number]
        for step, status in zip(frame.steps, statuses, strict=True):
            session = self._running.get(step.session)
            if session is None:
                continue
            if not isinstance(status, StepOk) and not session.is_stale(step):
                skipped = "a live step was skipped by a stage"
                message = status.message if isinstance(status, StepFailed) else skipped
                self._retire(session, now, SkippyError(message))
            elif isinstance(step, ProbeStep | PrefillStep | DecodeStep | VerifyStep):
                ok = status if isinstance(status, StepOk) else None
                self._complete(session, step, ok, now, drafts_follow=drafts_follow)

    def frame_drafted(self, drafts: Sequence[Draft], now: float) -> None:
        """The drafts of the last stage's MTP head behind a frame that is done."""
        for draft in drafts:
            session = self._running.get(draft.session)
            if session is not None:
                session.drafted(draft, now)
                self._scheduler.update(session)

    def fail_all(self, error: SkippyError, now: float, waiting_error: SkippyError | None = None) -> None:
        """The pipeline is gone, or the server stops: every session ends with the error."""
        for waiting in self._admission.withdraw_all():
            self._fail(waiting, waiting_error or error)
        for session in list(self._running.values()):
            self._retire(session, now, error)

    def tick(self, now: float) -> None:
        """Time has passed: requests that waited too long are refused."""
        expired = self._admission.expire(now)
        for session, error in expired:
            self._fail(session, error)
        if expired:
            self._start(self._admission.admit(), now)

    # The draft model, which has frames of its own.

    def use_draft_model(self, drafts: DraftPool) -> None:
        """There is a draft model from now on, for requests that begin now."""
        self._drafts = drafts

    def next_draft_frame(self) -> Frame | None:
        """The draft model's next frame, if it can take one and there is something to draft."""
        return self._drafts.next_frame() if self._drafts is not None else None

    def draft_frame_done(self, number: int, statuses: Sequence[StepStatus], now: float) -> None:
        """A frame of the draft model has come back."""
        if self._drafts is not None:
            self._propose(self._drafts.frame_done(number, statuses), now)

    def lose_draft_model(self, now: float) -> None:
        """The draft model is gone: requests go on without it."""
        drafts, self._drafts = self._drafts, None
        if drafts is not None:
            waiting = drafts.lose()
            for session in self._running.values():
                session.lose_draft_model()
                self._scheduler.update(session)
            self._propose(waiting, now)

    def _ask_drafts(self, session: Session, now: float) -> None:
        wanted = session.wanted_drafts
        if wanted and self._drafts is not None:
            drafted = self._drafts.want(session.id, wanted)
            if drafted is not None:
                session.proposed(drafted.tokens, now)

    def _propose(self, answers: Sequence[Drafted], now: float) -> None:
        for drafted in answers:
            session = self._running.get(drafted.session)
            if session is not None:
                session.proposed(drafted.tokens, now)
                self._scheduler.update(session)

    # Steps and outputs.

    def next_frame(self, now: float) -> Frame | None:
        """Build the next frame if stage 0 has a place and there is something to send."""
        at_stage_0 = self._number - self._left_first
        if at_stage_0 >= self._frames_per_link or len(self._in_flight) >= self._max_frames:
            return None
        decode_frames = sum(frame.decodes for frame in self._in_flight.values())
        picks = self._scheduler.pick(decode_frames, now, queues=at_stage_0 > 0)
        # The first frame leaves at once, with nothing in it: it frees what an older incarnation left on the stages.
        if self._announced and not (picks or self._ended or self._closing):
            return None
        self._announced = True
        # Ends come first: what they free and record counts for everything behind them.
        steps: list[Step] = list(self._closing)
        tokens: list[int] = []
        for session, step in picks:
            dispatched = session.dispatch(step, now)
            steps += (*dispatched.before, step, *dispatched.after)
            tokens += dispatched.tokens
            self._scheduler.dispatched(session)
            self._note_records(session, dispatched.after)
            if self._stages == 1 and isinstance(step, PrefillStep):
                session.credit_returned(now)
        self._number += 1
        decodes = any(isinstance(step, DecodeStep | VerifyStep) for _, step in picks)
        epochs = tuple(self._live_epochs.items())
        frame = Frame(self._number, tuple(steps), tuple(tokens), tuple(self._ended), epochs, decodes=decodes)
        self._live_epochs.clear()
        self._ended.clear()
        self._closing.clear()
        self._in_flight[frame.number] = frame
        self.counters.frames += 1
        return frame

    def take_outputs(self) -> list[Output]:
        """What has happened to sessions since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # What stages report.

    def _prefill_steps(self, frame: Frame) -> Iterator[tuple[Session, PrefillStep]]:
        for step in frame.steps:
            session = self._running.get(step.session)
            if session is not None and isinstance(step, PrefillStep):
                yield session, step

    def _observe(self, frame: Frame, stage: int, report: StageReport) -> None:
        for session, step in self._prefill_steps(frame):
            session.left_stage(step, stage, report)

    def _note_left(self, number: int, stage: int, now: float) -> None:
        """Return the credits of the frame that the second stage can start on now, if there is one.

        It starts on a frame that has left the first stage once it has answered the one before.
        """
        if stage == 0:
            self._left_first = number
            starts = number if self._left_second >= number - 1 else 0
        elif stage == 1:
            self._left_second = number
            starts = number + 1 if self._left_first > number else 0
        else:
            return
        if self._stages > 1 and starts:
            for session, _ in self._prefill_steps(self._in_flight[starts]):
                session.credit_returned(now)

    # The two ends of a session.

    def _start(self, admitted: Sequence[Session], now: float) -> None:
        for session in admitted:
            plan = session.request.speculation
            session.native_mtp = plan.native_mtp.enabled and self._prefixes.native_mtp
            if self._drafts is not None and plan.draft_model:
                session.draft_model = self._drafts.open(
                    session.id, session.context, session.max_positions, session.request.sampling
                )
            terms = self._prefixes.terms(
                session.request, native_mtp=session.native_mtp, draft_model=session.draft_model
            )
            self.counters.prefix_queries += terms.probes
            session.begin(terms, now)
            self._running[session.id] = session
            self._scheduler.add(session)

    def _retire(self, session: Session, now: float, error: SkippyError | None = None) -> None:
        session.end()
        del self._running[session.id]
        self._scheduler.remove(session)
        if self._drafts is not None:
            self._drafts.close(session.id)
        self._admission.release(session)
        if session.on_stages and error is None:
            closing = session.closing()
            self._note_records(session, closing)
            self._closing += closing
        elif session.on_stages:
            self._ended.append(session.id)
            self._live_epochs.pop(session.id, None)
        if error is not None:
            self._fail(session.id, error)
        self._start(self._admission.admit(), now)

    def _fail(self, session: int, error: SkippyError) -> None:
        if isinstance(error, Cancelled):
            self.counters.cancelled += 1
        else:
            self.counters.failed += 1
        self._outputs.append(Failure(session, error))

    def _complete(
        self, session: Session, step: SessionStep, status: StepOk | None, now: float, *, drafts_follow: bool
    ) -> None:
        known, epoch = len(session.predicted), session.epoch
        try:
            commit = session.complete(step, status, now, drafts_follow=drafts_follow)
        except ValueError as error:
            self._retire(session, now, SkippyError(str(error)))
            return
        if session.epoch > epoch:
            self._live_epochs[session.id] = session.epoch
        if isinstance(step, ProbeStep):
            self._restored(session, now)
        if isinstance(step, PrefillStep) and step.sample and session.prefill is not None:
            self.counters.count_prefill(session.prefill.finish(self._prefill.transport))
        if commit is not None:
            key = session.prefix.output_key
            if key is not None and len(session.predicted) > known:
                self._prefixes.learned(key, session.predicted, known)
            self._outputs.append(commit)
            self.counters.output_tokens += len(commit.tokens)
            if commit.cache is not None:
                self.counters.finished += 1
                self.counters.prompt_tokens += session.n_prompt
                self.counters.count_cache(commit.cache, len(session.prefix.plan.tokens))
                if commit.speculation is not None:
                    self.history.speculation.add(commit.speculation)
                self._retire(session, now)
                return
        self._ask_drafts(session, now)
        self._scheduler.update(session)

    def _restored(self, session: Session, now: float) -> None:
        """It is known what a session restores: positions that others hold too are accounted once."""
        length = session.prefix.plan.length
        self.counters.prefix_hits += length > 0
        if length and self._prefixes.shares_blocks:
            tokens = session.prefix.probe_tokens
            self._budget.share(session.id, session.prefix.namespace, tokens, length)
            self._start(self._admission.admit(), now)

    def _note_records(self, session: Session, controls: Sequence[Control]) -> None:
        if any(isinstance(control, RecordStep) for control in controls):
            self._prefixes.recorded(session.prefix.namespace, session.context)

    def check_integrity(self) -> None:
        """Raise AssertionError when sessions, places, reservations and frames disagree."""
        self._admission.check_integrity(set(self._running))
        self._scheduler.check_integrity(self._running)
        if self._drafts is not None:
            self._drafts.check_integrity(set(self._running))
        for session in self._running.values():
            session.check_integrity()
        at_stage_0 = self._number - self._left_first
        assert 0 <= at_stage_0 <= len(self._in_flight), "more frames at stage 0 than in flight"
        waited_for = ProbeStep | PrefillStep | DecodeStep | VerifyStep
        in_frames = [
            s.session for f in self._in_flight.values() for s in f.steps if isinstance(s, waited_for)
        ]
        for name, session in self._running.items():
            assert in_frames.count(name) == session.steps_in_flight, f"session {name} has lost a step"
