"""Frames as the core makes them, and what stages report of them."""

from __future__ import annotations

from dataclasses import dataclass

from skippy_stage.protocol import Step


@dataclass(frozen=True, slots=True)
class Frame:
    """Steps of many sessions that travel the pipeline together."""

    number: int
    steps: tuple[Step, ...]
    tokens: tuple[int, ...]
    """Token ids of row steps and probes, in order."""
    ended: tuple[int, ...]
    live_epochs: tuple[tuple[int, int], ...] = ()
    decodes: bool = False


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage's work on one frame took."""

    rows: int = 0
    """Rows that were executed, of all sessions."""
    compute_us: int = 0
    queue_us: int = 0
    """Time behind other frames at the stage."""
    call_us: int = 0
    """From sending the frame to having its result."""
    sent_bytes: int = 0
    """Hidden rows that were sent to the stage."""

    @property
    def write_us(self) -> int:
        """What the call took beside waiting and computing at the stage."""
        return max(0, self.call_us - self.compute_us - self.queue_us)
