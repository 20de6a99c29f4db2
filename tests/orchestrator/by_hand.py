"""A core whose frames a test moves by hand: no stage computes anything, every event is the test's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skippy_orchestrator.core import Core, Failure
from skippy_orchestrator.deployment import (
    LimitsSection,
    PrefillSection,
    PrefixCacheSection,
    SchedulerSection,
)
from skippy_orchestrator.frames import Frame, StageReport
from skippy_orchestrator.history import History
from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.prefix.cache import PrefixCache, StageFacts
from skippy_orchestrator.sessions import Commit
from skippy_stage.protocol import (
    PrefillStep,
    ProbeStep,
    Restorable,
    Step,
    StepOk,
    StepStatus,
    predictions_of,
    rows_of,
    tokens_of,
)

from tests.orchestrator.making import a_request
from tests.orchestrator.simulation import OFF, TokenText

Override = Callable[[Step], StepStatus | None]


class Hand:
    """A core, its frames in flight, and the time. Every prediction is ``token``."""

    def __init__(
        self,
        stages: int = 2,
        *,
        prefill: PrefillSection | None = None,
        credits: int = 3,
        chunk: int = 8,
        prefix: PrefixCacheSection = OFF,
        blocks: int = 4096,
        end_tokens: frozenset[int] = frozenset(),
        history: History | None = None,
        **scheduler: Any,
    ) -> None:
        self.now = 0.0
        self.stages = stages
        self.token = 40
        self.restorable = Restorable(0)
        """What stages say that they could restore."""
        self.history = history or History.of(prefix)
        facts = StageFacts(stages, 4, "scripted", stores=prefix.mode != "disabled")
        self.core = Core(
            stages,
            KvBudget(blocks, 4),
            end_tokens,
            SchedulerSection(**{"prefill_rows_while_decoding": 0, **scheduler}),
            prefill or PrefillSection(policy="fixed", chunk_tokens=chunk, credits=credits),
            LimitsSection(),
            PrefixCache(prefix, "test", facts, self.history.prefixes),
            self.history,
        )
        self.frames: dict[int, Frame] = {}
        self.left_at = [0] * stages
        """The latest frame that has left each stage."""
        self.commits: list[Commit] = []
        self.errors: dict[int, str] = {}

    def submit(self, session: int, prompt: int | Sequence[int], max_tokens: int = 1, **options: Any) -> None:
        tokens = range(prompt) if isinstance(prompt, int) else prompt
        self.core.submit(session, a_request(tokens, max_tokens, **options), TokenText(), self.now)

    def cancel(self, session: int) -> None:
        self.core.cancel(session, self.now)
        self._take()

    def send(self) -> list[Frame]:
        """All frames that can be built now."""
        sent = []
        while (frame := self.core.next_frame(self.now)) is not None:
            assert len(frame.tokens) == sum(map(tokens_of, frame.steps))
            self.frames[frame.number] = frame
            sent.append(frame)
        self.core.check_integrity()
        return sent

    def leave(self, number: int, stage: int = 0, report: StageReport | None = None) -> None:
        """A frame leaves a stage that is not the last."""
        assert self.left_at[stage] == number - 1, "frames leave a stage in order"
        assert stage == 0 or self.left_at[stage - 1] >= number, "a frame was not there yet"
        self.left_at[stage] = number
        self.core.frame_left_stage(number, stage, report or self._report(number), self.now)
        self.core.check_integrity()

    def done(
        self, number: int, report: StageReport | None = None, override: Override = lambda step: None
    ) -> None:
        """A frame leaves the last stage; steps are ok unless ``override`` says otherwise."""
        assert self.left_at[-1] == number - 1, "frames are done in order"
        self.left_at[-1] = number
        statuses = [override(step) or self._ok(step) for step in self.frames[number].steps]
        self.core.frame_done(number, statuses, report or self._report(number), self.now)
        del self.frames[number]
        self._take()
        self.core.check_integrity()

    def go(self, number: int, stage: int) -> None:
        """A frame leaves a stage, whichever that is."""
        if stage == self.stages - 1:
            self.done(number)
        else:
            self.leave(number, stage)

    def pass_through(self, *reports: StageReport) -> None:
        """The oldest frame goes all the way that is left; ``reports`` are those of the stages in order."""
        number = min(self.frames)
        for stage in range(self.stages - 1):
            if self.left_at[stage] < number:
                self.leave(number, stage, reports[stage] if reports else None)
        self.done(number, reports[-1] if reports else None)

    def run(self) -> None:
        """Everything that is left to do, frame by frame."""
        while self.send() or self.frames:
            self.pass_through()
        assert self.core.idle

    def credits_out(self, session: int) -> int:
        prefill = self.core._running[session].prefill
        return 0 if prefill is None else prefill.pending

    def _report(self, number: int) -> StageReport:
        rows = sum(map(rows_of, self.frames[number].steps))
        return StageReport(rows=rows, compute_us=100 * rows, call_us=100 * rows)

    def _ok(self, step: Step) -> StepOk:
        if isinstance(step, ProbeStep):
            return StepOk(restorable=self.restorable)
        return StepOk(tokens=(self.token,) * predictions_of(step))

    def _take(self) -> None:
        for output in self.core.take_outputs():
            if isinstance(output, Failure):
                self.errors[output.session] = output.error.message
            else:
                self.commits.append(output)


def chunks_in(frame: Frame) -> list[tuple[int, int]]:
    """Session and first position of every chunk in a frame."""
    return [(step.session, step.pos_start) for step in frame.steps if isinstance(step, PrefillStep)]
