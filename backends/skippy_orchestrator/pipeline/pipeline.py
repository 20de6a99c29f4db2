"""The links of one incarnation and the frames in flight on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from skippy_stage.engines.base import Hidden
from skippy_stage.protocol import Draft, DraftResult, FrameHeader, FrameResult, StepStatus

from skippy_orchestrator.frames import Frame, StageReport
from skippy_orchestrator.pipeline.flight import Flight
from skippy_orchestrator.pipeline.link import Link, Transport


@dataclass(frozen=True, slots=True)
class FrameLeftStage:
    """A stage that is not the last has answered a frame."""

    incarnation: int
    number: int
    stage: int
    report: StageReport


@dataclass(frozen=True, slots=True)
class FrameDone:
    """The last stage has answered a frame; one status per step."""

    incarnation: int
    number: int
    statuses: Sequence[StepStatus]
    report: StageReport
    drafts_follow: bool = False
    """FrameDrafted comes for it too."""


@dataclass(frozen=True, slots=True)
class FrameDrafted:
    """The drafts of the last stage's MTP head behind a frame that is done."""

    incarnation: int
    number: int
    drafts: Sequence[Draft]


@dataclass(frozen=True, slots=True)
class PipelineFailed:
    """A link broke: the outcome of what is in flight is unknown."""

    incarnation: int
    stage: str
    message: str


PipelineEvent: TypeAlias = FrameLeftStage | FrameDone | FrameDrafted | PipelineFailed


class Pipeline:
    """All links of a deployment, for one incarnation.

    Events come from the links' threads, one at a time and in frame order per link; after PipelineFailed or
    ``stop`` there are no more. ``on_event`` must neither block nor call the pipeline.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        incarnation: int,
        frames_per_link: int,
        on_event: Callable[[PipelineEvent], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        link_delay_s: float = 0.0,
    ) -> None:
        """``link_delay_s`` is a simulated network between the stages (spec 8.10)."""
        self._link_delay_s = link_delay_s
        self._clock = clock
        self.incarnation = incarnation
        self._names = [transport.name for transport in transports]
        self._on_event = on_event
        self._in_flight = 0
        self._lock = threading.Lock()
        self._over = False
        self._links = [
            Link(
                *(transport, frames_per_link, self._header, self._on_result),
                *(self._on_drafts, self._on_failure, clock),
            )
            for transport in transports
        ]
        for link in self._links:
            link.start()

    def submit(self, frame: Frame) -> None:
        """Send a frame on its way; never blocks. Frames go in the order of their numbers."""
        with self._lock:
            self._in_flight += 1
        self._links[0].submit(Flight(frame, self._names))

    def check_deadlines(self, now: float, limit_s: float) -> None:
        """Fail the pipeline when a frame has been with a stage for longer than ``limit_s``."""
        for link in self._links:
            if link.overdue(now, limit_s):
                self._on_failure(link.name, f"no answer within {limit_s:g} s")

    def fail(self, stage: str, message: str) -> None:
        """Somebody else knows that a stage is gone."""
        self._on_failure(stage, message)

    def stop(self, timeout: float) -> bool:
        """Stop the links; False when a thread is still stuck in a call after ``timeout`` s in all."""
        with self._lock:
            self._over = True
        for link in self._links:
            link.stop()
        deadline = time.monotonic() + timeout
        ended = [link.join(max(0.0, deadline - time.monotonic())) for link in self._links]
        return all(ended)

    def _header(self, flight: Flight) -> FrameHeader:
        return flight.header(self.incarnation, min(len(self._links), self._in_flight))

    def _on_result(self, flight: Flight, result: FrameResult, hidden: Hidden | None, call_s: float) -> None:
        report = StageReport(
            rows=result.rows,
            compute_us=result.compute_us,
            queue_us=result.queue_us,
            call_us=round(call_s * 1e6),
            sent_bytes=0 if flight.hidden is None else flight.hidden.nbytes,
        )
        stage, number = flight.stage, flight.frame.number
        flight.advance(result, hidden)
        if flight.done:
            with self._lock:
                self._in_flight -= 1
            self._tell(FrameDone(self.incarnation, number, flight.statuses, report, result.drafts_follow))
        else:
            self._tell(FrameLeftStage(self.incarnation, number, stage, report))
            arrival = self._clock() + self._link_delay_s if self._link_delay_s else 0.0
            self._links[flight.stage].submit(flight, arrival)

    def _on_drafts(self, result: DraftResult) -> None:
        self._tell(FrameDrafted(self.incarnation, result.frame, result.drafts))

    def _on_failure(self, stage: str, message: str) -> None:
        self._tell(PipelineFailed(self.incarnation, stage, message))
        for link in self._links:
            link.stop()

    def _tell(self, event: PipelineEvent) -> None:
        with self._lock:
            if not self._over:
                self._over = isinstance(event, PipelineFailed)
                self._on_event(event)
