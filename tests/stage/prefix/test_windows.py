"""Records and restores between verify windows in flight: nothing unverified is ever kept (spec 4, 7.6).

A stage runtime is fed as the orchestrator would with several windows of one sequence in flight: windows go on
from drafts that may be wrong, a rejection shows at the next ``pos_start``, and controls ride between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from skippy_stage.prefix.resident import ResidentPrefixes
from skippy_stage.protocol import (
    ProbeStep,
    RecordStep,
    RestoreStep,
    Step,
    StepOk,
    StepSkipped,
    StopStep,
    VerifyStep,
)
from skippy_stage.runtime import StageRuntime

from tests.scripted import VOCAB, ScriptedEngine, reference
from tests.stage.test_runtime import Stage, opened, prefill

ROOM = 24
PROMPTS = ([5, 6, 7, 8, 9], [5, 6, 7, 1, 2, 3], [5, 6, 7, 8, 9, 4, 4])


@dataclass
class Generation:
    """A session as the orchestrator knows it."""

    prompt: list[int]
    committed: list[int] = field(default_factory=list)
    optimistic: list[int] = field(default_factory=list)
    """Committed tokens and the drafts behind them that windows in flight have sent."""
    epoch: int = 0


class Windows(RuleBasedStateMachine):
    """``sent`` are frames not executed yet, with what has to come of their windows."""

    @initialize(blocks=st.integers(14, 30), size=st.integers(1, 4))
    def start(self, blocks: int, size: int) -> None:
        self.engine = ScriptedEngine(blocks=blocks * 4 // size, block_tokens=size)
        self.stage = Stage(self.engine)
        self.store = ResidentPrefixes(self.engine.prefix_blocks)
        self.stage.runtime = StageRuntime(self.engine, "stage_0", prefixes=self.store)
        self.sessions: dict[int, Generation] = {}
        self.verified: set[tuple[int, ...]] = set()
        """Every text that was committed, at any time."""
        self.sent: list[list[tuple[int, VerifyStep, list[int]]]] = []
        self.names = iter(range(1, 1 << 20))

    def send(self, *steps: Step, tokens: list[int], live: tuple[tuple[int, int], ...] = ()) -> None:
        self.stage.accept(*steps, tokens=tokens, live_epochs=live)
        self.sent.append([])

    @precondition(lambda self: len(self.sessions) < 2)
    @rule(prompt=st.sampled_from(PROMPTS), data=st.data())
    def begin(self, prompt: list[int], data: Any) -> None:
        """Probe, restore some of it, compute the rest, and record the prompt in the same frame."""
        self.drain()
        name = next(self.names)
        self.stage.accept(
            opened(name, ROOM), ProbeStep(session=name, epoch=0, length=len(prompt)), tokens=prompt
        )
        _, answer = self.stage.execute()
        assert isinstance(answer, StepOk)
        assert answer.restorable is not None
        length = data.draw(st.integers(0, answer.restorable.best(len(prompt) - 1)), label="restore")
        steps: list[Step] = [RestoreStep(session=name, epoch=0, length=length)] if length else []
        steps += [
            prefill(name, length, len(prompt) - length, sample=True),
            RecordStep(session=name, epoch=0, length=len(prompt)),
        ]
        self.stage.accept(*steps, tokens=prompt[length:])
        statuses = self.stage.execute()
        first = reference(prompt, 1)
        assert statuses[-2] == StepOk(tokens=tuple(first))
        assert statuses[-1] == StepOk()
        self.sessions[name] = Generation(prompt, [*prompt, *first], [*prompt, *first])
        self.note(name)

    @precondition(lambda self: self.sessions and len(self.sent) < 4)
    @rule(rows=st.integers(1, 4), wrong=st.integers(-1, 3), record=st.booleans(), data=st.data())
    def window(self, rows: int, wrong: int, record: bool, data: Any) -> None:
        """Send a window behind those in flight; from draft ``wrong`` on its inputs are not what the target says."""
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        session = self.sessions[name]
        start = len(session.optimistic) - 1
        if start + rows > ROOM:
            return
        truth = reference(session.prompt, ROOM)
        drafts = [truth[start + i + 1 - len(session.prompt)] for i in range(rows - 1)]
        if 0 <= wrong < len(drafts):
            drafts[wrong:] = [(token + 1) % VOCAB for token in drafts[wrong:]]
        step = VerifyStep(session=name, epoch=session.epoch, pos_start=start, rows=rows, window=1)
        inputs = [session.optimistic[-1], *drafts]
        controls: list[Step] = []
        if record:
            # A record names at most what is committed and computed, whatever windows are still in flight.
            length = data.draw(st.integers(1, len(session.committed) - 1), label="record")
            controls = [RecordStep(session=name, epoch=session.epoch, length=length)]
        self.stage.accept(*controls, step, tokens=inputs)
        self.sent.append([(name, step, inputs)])
        session.optimistic += [*drafts, truth[start + rows - len(session.prompt)]]

    @precondition(lambda self: self.sent)
    @rule()
    def execute(self) -> None:
        """The stage runs the oldest frame; its window is classified and committed, or starts a new epoch."""
        statuses = self.stage.execute()
        for name, step, inputs in self.sent.pop(0):
            session = self.sessions.get(name)
            if session is None or step.epoch < session.epoch:
                continue
            status = statuses[-1]
            if isinstance(status, StepSkipped):
                continue
            assert isinstance(status, StepOk), status
            self.classify(name, session, step, inputs, list(status.tokens))

    def classify(
        self, name: int, session: Generation, step: VerifyStep, inputs: list[int], predicted: list[int]
    ) -> None:
        truth = [*session.prompt, *reference(session.prompt, ROOM + 2)]
        if session.committed[-1] != inputs[0] or len(session.committed) - 1 != step.pos_start:
            raise AssertionError("a window of a live epoch starts at what is committed")
        accepted = 0
        while accepted < step.rows - 1 and predicted[accepted] == inputs[accepted + 1]:
            accepted += 1
        session.committed += predicted[: accepted + 1]
        assert session.committed == truth[: len(session.committed)], "the target decides"
        self.note(name)
        if accepted < step.rows - 1:
            # Later windows went on from a wrong draft: a new epoch, at the committed position.
            session.epoch += 1
            session.optimistic = list(session.committed)

    def note(self, name: int) -> None:
        committed = self.sessions[name].committed
        for length in range(1, len(committed) + 1):
            self.verified.add(tuple(committed[:length]))

    @precondition(lambda self: self.sessions)
    @rule(record=st.booleans(), early=st.booleans(), data=st.data())
    def end(self, record: bool, early: bool, data: Any) -> None:
        """A session finishes and records what it has, or is broken off with windows still queued."""
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        if early:
            self.stage.accept(ended=(name,))
            del self.sessions[name]
            self.sent.append([])
            return
        self.drain()
        session = self.sessions.pop(name)
        length = len(session.committed) - 1
        steps: list[Step] = [RecordStep(session=name, epoch=session.epoch, length=length)] if record else []
        statuses = self.stage.frame(*steps, StopStep(session=name))
        assert all(status == StepOk() for status in statuses)

    @rule(wanted=st.integers(1, 6))
    def evict(self, wanted: int) -> None:
        self.store.reclaim(wanted)

    def drain(self) -> None:
        while self.sent:
            self.execute()

    @invariant()
    def no_record_holds_what_was_not_verified(self) -> None:
        if not hasattr(self, "engine"):
            return
        for node in self.store._tree.walk():  # the store shows no tokens to anybody else
            path: list[int] = []
            at: Any = node
            while at is not None:
                path[:0] = at.tokens
                at = at.parent
            assert tuple(path) in self.verified, f"{path} was recorded and never committed"
            held = self.engine.memory(node.block)[: len(node.tokens)]
            assert held == self.engine.columns_of(path)[node.start : node.end], "a recorded block has changed"
        self.store.check_integrity()

    @invariant()
    def live_sessions_hold_what_they_computed(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.drain()
            for name in list(self.sessions):
                self.stage.frame(ended=(name,))
            self.stage.runtime.check_integrity()


Windows.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWindows = Windows.TestCase
