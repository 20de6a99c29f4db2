"""Drives a scheduler with frames in flight, completed in order; checks what holds for every frame."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_orchestrator.deployment import SchedulerSection
from skippy_orchestrator.frames import StageReport
from skippy_orchestrator.prefix.session import OFF
from skippy_orchestrator.scheduler import Scheduler
from skippy_orchestrator.sessions import Phase, Session, SessionStep
from skippy_stage.protocol import DecodeStep, PrefillStep, ProbeStep, Restorable, StepOk, rows_of

from tests.orchestrator.making import a_request, fixed, probing
from tests.orchestrator.simulation import TokenText

Picks = list[tuple[Session, SessionStep]]


class Driver:
    """A scheduler with frames in flight, completed in order. A chunk's credit returns with its frame."""

    def __init__(
        self,
        stages: int = 1,
        chunk: int = 8,
        credits: int = 2,
        rows: int = 256,
        group: int = 4,
        bound: int = 8,
    ) -> None:
        self.rows = rows
        self.bound = bound
        settings = SchedulerSection(
            max_frame_rows=rows, min_group_rows=group, prefill_rows_while_decoding=bound
        )
        self.scheduler = Scheduler(settings, stages)
        self.terms = fixed(chunk, credits)
        self.running: dict[int, Session] = {}
        self.in_flight: list[Picks] = []
        self._restorable: dict[int, int] = {}
        self._served: dict[int, set[int]] = {}

    def add(
        self, name: int, n_prompt: int, max_tokens: int, restorable: int = -1, outputs: Sequence[int] = ()
    ) -> Session:
        """A session that starts; with ``restorable`` it asks first and is then told that."""
        request = a_request(range(n_prompt), max_tokens)
        session = Session(name, request, TokenText(), frozenset(), self.terms)
        session.begin(OFF if restorable < 0 else probing(*outputs), 0.0)
        self._restorable[name] = restorable
        self.running[name] = session
        self.scheduler.add(session)
        return session

    @property
    def decoding(self) -> int:
        """Sessions whose prompt is all on its way."""
        return sum(session.phase is Phase.DECODE for session in self.running.values())

    def send(self) -> Picks:
        """Build a frame; checks everything that holds for each."""
        decode_frames = sum(any(isinstance(step, DecodeStep) for _, step in f) for f in self.in_flight)
        waiting = [s for s in self.running.values() if _could_go(s)]
        picks = self.scheduler.pick(decode_frames, 0.0)
        self._check_rows(picks, decode_frames)
        self._check_fairness(waiting, picks)
        for session, step in picks:
            session.dispatch(step, 0.0)
            self.scheduler.dispatched(session)
        if picks:
            self.in_flight.append(picks)
        self.scheduler.check_integrity(self.running)
        return picks

    def _check_rows(self, picks: Picks, decode_frames: int) -> None:
        decodes = sum(isinstance(step, DecodeStep) for _, step in picks)
        prefill = sum(rows_of(step) for _, step in picks if isinstance(step, PrefillStep))
        assert decodes + prefill <= self.rows
        if self.bound and self.decoding:
            assert prefill <= self.bound, "a stream waits for more than it has to"
        assert len({session.id for session, _ in picks}) == len(picks), "a session has two steps"
        kinds = [isinstance(step, DecodeStep) for _, step in picks]
        assert kinds == sorted(kinds, reverse=True), "decode rows come first"
        if decodes:
            assert decode_frames < self.scheduler.groups
            assert decodes <= -(-self.decoding // self.scheduler.groups), "more than its share"

    def _check_fairness(self, waiting: list[Session], picks: Picks) -> None:
        """While one waits that could go, no other of its kind goes twice; and a question never waits."""
        picked = {session.id for session, _ in picks}
        for session in waiting:
            others = {other.id for other, _ in picks if other.phase is session.phase}
            if session.id in picked:
                self._served.pop(session.id, None)
            else:
                assert session.phase is not Phase.PROBE, "a question waits"
                served = self._served.setdefault(session.id, set())
                assert not served & others, f"{served & others} went twice while {session.id} waited"
                served |= others

    def complete(self) -> None:
        """The oldest frame comes back; who is at the end ends."""
        for session, step in self.in_flight.pop(0):
            status = StepOk()
            if isinstance(step, PrefillStep):
                session.left_stage(step, 0, StageReport(rows=step.rows))
                session.credit_returned(0.0)
                status = StepOk(tokens=(1,) if step.sample else ())
            elif isinstance(step, DecodeStep):
                status = StepOk(tokens=(1,))
            elif isinstance(step, ProbeStep):
                status = StepOk(restorable=Restorable(self._restorable[session.id]))
            commit = session.complete(step, status, 0.0)
            if commit is not None and commit.finish_reason:
                self.remove(session)
            elif session.id in self.running:
                self.scheduler.update(session)
        self.scheduler.check_integrity(self.running)

    def remove(self, session: Session) -> None:
        session.end()
        if self.running.pop(session.id, None) is not None:
            self.scheduler.remove(session)
        self._served.pop(session.id, None)

    def start_decoding(self, count: int) -> None:
        for name in range(count):
            self.add(name, 1, 10_000)
        while self.send():
            pass
        while self.in_flight:
            self.complete()


def _could_go(session: Session) -> bool:
    """Whether it would give a step; asking a decoding session for one would take it."""
    if session.phase is Phase.DECODE:
        return session.wants_step
    return session.next_step(1, 0.0) is not None


def steps_of(picks: Picks) -> list[tuple[int, int]]:
    """Session and rows of every step."""
    return [(session.id, rows_of(step)) for session, step in picks]
