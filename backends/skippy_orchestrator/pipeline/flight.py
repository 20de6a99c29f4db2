"""One frame's way over the stages, as plain data.

A stage gets the steps that every stage before it found ok, rows compacted. What a step became is decided by
the first stage that did not find it ok; the failure's message starts with that stage's name. A frame
without any step left travels on all the same: it carries ended sessions, and numbers must not have gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from skippy_stage.engines.base import Hidden
from skippy_stage.errors import ProtocolError
from skippy_stage.protocol import (
    FrameHeader,
    FrameResult,
    StepFailed,
    StepOk,
    StepSkipped,
    StepStatus,
    rows_of,
    tokens_of,
)

from skippy_orchestrator.frames import Frame


class Flight:
    """A frame between its dispatch and its last stage."""

    def __init__(self, frame: Frame, stages: Sequence[str]) -> None:
        self.frame = frame
        self.stage = 0
        self.hidden: Hidden | None = None
        self.statuses: list[StepStatus] = [StepSkipped()] * len(frame.steps)
        self._stages = stages
        self._alive = list(range(len(frame.steps)))
        self._tokens = np.asarray(frame.tokens, dtype=np.int32)

    @property
    def done(self) -> bool:
        """True when the last stage has answered."""
        return self.stage == len(self._stages)

    def header(self, incarnation: int, busy_stages: int) -> FrameHeader:
        """The header for the stage that is next."""
        steps = self.frame.steps
        return FrameHeader(
            incarnation=incarnation,
            frame=self.frame.number,
            steps=tuple(steps[i] for i in self._alive),
            ended=self.frame.ended,
            live_epochs=self.frame.live_epochs,
            busy_stages=busy_stages,
        )

    def tokens(self) -> npt.NDArray[np.int32]:
        """Token ids of the steps that are still alive: INT32 ``[tokens]``."""
        if len(self._alive) == len(self.frame.steps):
            return self._tokens
        counts = [tokens_of(step) for step in self.frame.steps]
        ends = np.cumsum(counts)
        parts = [self._tokens[ends[i] - counts[i] : ends[i]] for i in self._alive]
        return np.concatenate(parts) if parts else self._tokens[:0]

    def advance(self, result: FrameResult, hidden: Hidden | None) -> None:
        """The stage has answered; raises ProtocolError when the answer does not fit what was sent."""
        name = self._stages[self.stage]
        if result.frame != self.frame.number or len(result.statuses) != len(self._alive):
            raise ProtocolError(
                f"{name}: answered frame {result.frame} with {len(result.statuses)} statuses, "
                f"expected frame {self.frame.number} with {len(self._alive)}"
            )
        alive: list[int] = []
        for index, status in zip(self._alive, result.statuses, strict=True):
            if isinstance(status, StepFailed):
                status = StepFailed(code=status.code, message=f"{name}: {status.message}")
            elif isinstance(status, StepOk):
                alive.append(index)
                status = _with_earlier(status, self.statuses[index])
            self.statuses[index] = status
        self._alive = alive
        self.stage += 1
        rows = sum(rows_of(self.frame.steps[i]) for i in alive)
        if not self.done and rows != (0 if hidden is None else len(hidden)):
            got = "none" if hidden is None else len(hidden)
            raise ProtocolError(f"{name}: answered with {got} hidden rows, expected {rows}")
        self.hidden = hidden


def _with_earlier(status: StepOk, earlier: StepStatus) -> StepOk:
    """A probe's answer: what this stage and all before it could restore."""
    if status.restorable is None or not isinstance(earlier, StepOk) or earlier.restorable is None:
        return status
    return StepOk(tokens=status.tokens, restorable=status.restorable.common(earlier.restorable))
