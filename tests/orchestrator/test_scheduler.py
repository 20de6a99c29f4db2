"""Which steps make a frame: budgets, fairness, and decoding sessions spread over the stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.deployment import SchedulerSection
from skippy_orchestrator.prefill import FixedChunks
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.scheduler import Scheduler
from skippy_orchestrator.sessions import Phase, Session
from skippy_stage.protocol import DecodeStep, PrefillStep, RowStep, SamplingParams, rows_of

from tests.orchestrator.simulation import TokenText

Picks = list[tuple[Session, RowStep]]


class Driver:
    """A scheduler with frames in flight, completed in order."""

    def __init__(
        self, stages: int = 1, chunk: int = 8, credits: int = 2, rows: int = 256, group: int = 4
    ) -> None:
        self.chunk = chunk
        self.rows = rows
        self.credits = credits
        self.scheduler = Scheduler(SchedulerSection(max_frame_rows=rows, min_group_rows=group), chunk, stages)
        self.running: dict[int, Session] = {}
        self.in_flight: list[Picks] = []
        self._served: dict[int, set[int]] = {}

    def add(self, name: int, n_prompt: int, max_tokens: int) -> None:
        request = GenerationRequest(
            prompt=tuple(range(n_prompt)), max_tokens=max_tokens, sampling=SamplingParams()
        )
        session = Session(name, request, TokenText(), frozenset(), FixedChunks(self.chunk), self.credits)
        self.running[name] = session
        self.scheduler.add(session)

    def send(self) -> Picks:
        """Build a frame; checks everything that holds for each."""
        decode_frames = sum(any(isinstance(step, DecodeStep) for _, step in f) for f in self.in_flight)
        waiting = [s for s in self.running.values() if s.next_step(1) is not None]
        picks = self.scheduler.pick(decode_frames)
        self._check_rows(picks, decode_frames)
        self._check_fairness(waiting, picks)
        for session, step in picks:
            session.dispatch(step)
            self.scheduler.dispatched(session)
        if picks:
            self.in_flight.append(picks)
        self.scheduler.check_integrity(self.running)
        return picks

    def _check_rows(self, picks: Picks, decode_frames: int) -> None:
        decodes = sum(isinstance(step, DecodeStep) for _, step in picks)
        prefill = sum(rows_of(step) for _, step in picks if isinstance(step, PrefillStep))
        assert decodes + prefill <= self.rows
        assert not decodes or prefill <= self.chunk, "a stream waits for more than one chunk"
        assert len({session.id for session, _ in picks}) == len(picks), "a session has two steps"
        if decodes:
            assert decode_frames < self.scheduler.groups
            decoding = sum(session.phase is Phase.DECODE for session in self.running.values())
            assert decodes <= -(-decoding // self.scheduler.groups), "more than its share"

    def _check_fairness(self, waiting: list[Session], picks: Picks) -> None:
        """While one waits that could go, no other of its kind goes twice."""
        picked = {session.id for session, _ in picks}
        for session in waiting:
            others = {other.id for other, _ in picks if other.phase is session.phase}
            if session.id in picked:
                self._served.pop(session.id, None)
            else:
                served = self._served.setdefault(session.id, set())
                assert not served & others, f"{served & others} went twice while {session.id} waited"
                served |= others

    def complete(self) -> None:
        """The oldest frame comes back; who is at the end ends."""
        for session, step in self.in_flight.pop(0):
            sampled = isinstance(step, DecodeStep) or step.sample  # type: ignore[union-attr]
            session.left_first_stage(step)
            commit = session.complete(step, [1] if sampled else [])
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


def steps_of(picks: Picks) -> list[tuple[int, int]]:
    return [(session.id, rows_of(step)) for session, step in picks]


def test_prompts_share_a_frame_up_to_its_rows_and_take_turns() -> None:
    d = Driver(rows=12, chunk=8)
    d.add(1, 40, 1)
    d.add(2, 40, 1)
    assert steps_of(d.send()) == [(1, 8), (2, 4)]
    assert steps_of(d.send()) == [(1, 8), (2, 4)]
    assert d.send() == [], "credits are out"
    d.complete()
    d.add(3, 2, 1)
    assert steps_of(d.send()) == [(1, 8), (2, 4)]
    d.complete()
    assert steps_of(d.send()) == [(3, 2), (1, 8), (2, 2)]


def test_decode_rows_come_first_and_leave_room_for_one_chunk() -> None:
    d = Driver(rows=256, chunk=8)
    d.start_decoding(5)
    d.add(10, 100, 1)
    d.add(11, 100, 1)
    assert steps_of(d.send()) == [(i, 1) for i in range(5)] + [(10, 8)]
    assert steps_of(d.send()) == [(11, 8), (10, 8)], "no stream is ready: the frame is theirs"


def test_a_frame_full_of_decode_rows_takes_nothing_else() -> None:
    d = Driver(rows=4, chunk=8)
    d.start_decoding(6)
    d.add(10, 100, 1)
    assert steps_of(d.send()) == [(i, 1) for i in range(4)]
    assert steps_of(d.send()) == [(10, 4)]
    d.complete()
    d.complete()
    assert [name for name, _ in steps_of(d.send())][:2] == [4, 5], "who was left out comes first"


@pytest.mark.parametrize(
    ("stages", "sessions", "group", "groups", "share"),
    [
        (1, 8, 1, 1, 8),
        (2, 8, 4, 2, 4),
        (2, 7, 4, 1, 7),
        (3, 9, 3, 3, 3),
        (3, 10, 3, 3, 4),
        (4, 9, 4, 2, 5),
        (4, 3, 1, 3, 1),
        (2, 1, 4, 1, 1),
    ],
)
def test_streams_are_spread_over_as_many_frames_as_it_is_worth(
    stages: int, sessions: int, group: int, groups: int, share: int
) -> None:
    d = Driver(stages, group=group)
    d.start_decoding(sessions)
    assert d.scheduler.groups == groups
    sizes = []
    while picks := d.send():
        sizes.append(len(picks))
    assert len(sizes) == groups
    assert max(sizes) == sizes[0] == share
    assert sum(sizes) == sessions
    for _ in range(40):
        d.complete()
        d.send()
    assert len(d.in_flight) == groups, "groups stay apart"
    assert max(map(len, d.in_flight)) - min(map(len, d.in_flight)) <= groups


def test_nobody_decodes_before_the_prompt_is_done() -> None:
    d = Driver(chunk=8, credits=1)
    d.add(1, 20, 3)
    kinds = []
    while d.running:
        picks = d.send()
        kinds += [type(step).__name__ for _, step in picks]
        d.complete()
    assert kinds == ["PrefillStep"] * 3 + ["DecodeStep"] * 2


@given(st.data())
def test_any_history_keeps_to_the_budgets_and_starves_nobody(data: st.DataObject) -> None:
    draw = data.draw
    stages = draw(st.integers(1, 4))
    d = Driver(
        stages,
        chunk=draw(st.integers(1, 9)),
        credits=draw(st.integers(0, 3)),
        rows=draw(st.integers(1, 24)),
        group=draw(st.integers(1, 4)),
    )
    most = stages + draw(st.integers(1, 3)) - 1
    for name in range(1, draw(st.integers(1, 25))):
        match draw(st.sampled_from(["add", "add", "send", "complete", "remove"])):
            case "add":
                d.add(name, draw(st.integers(1, 30)), draw(st.integers(1, 6)))
            case "send" if len(d.in_flight) < most:
                d.send()
            case "complete" if d.in_flight:
                d.complete()
            case "remove" if d.running:
                d.remove(draw(st.sampled_from(list(d.running.values()))))
    work = sum(len(s.request.prompt) + s.request.max_tokens for s in d.running.values())
    for _ in range(2 * work + 2 * most):
        while len(d.in_flight) < most and d.send():
            pass
        if not d.in_flight:
            break
        d.complete()
    assert not d.running
