"""The draft model's stage as the core's thread drives it: its heartbeat, its pipeline of one link, its frames.

Serving never waits for it. Without it requests decode as if their plan had no draft model; when it is back,
requests that begin then use it again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

from skippy_stage.protocol import StageStatus

from skippy_orchestrator.core import Core
from skippy_orchestrator.deployment import OrchestratorSettings
from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.pipeline.link import Transport
from skippy_orchestrator.pipeline.monitor import Monitor, StageHealth
from skippy_orchestrator.pipeline.pipeline import FrameDone, Pipeline, PipelineEvent, PipelineFailed
from skippy_orchestrator.speculation.draft_model import DraftCounters, DraftLimits, DraftPool

log = logging.getLogger(__name__)


class DraftStage:
    """One draft model. All methods but ``health`` and ``stop`` belong to the core's thread."""

    def __init__(
        self,
        transport: Transport,
        settings: OrchestratorSettings,
        vocab_size: int,
        on_event: Callable[[PipelineEvent], None],
        clock: Callable[[], float],
    ) -> None:
        """``vocab_size`` is that of both tokenizers; they are known to be equal."""
        limits = settings.limits
        self.counters = DraftCounters()
        self._transport = transport
        self._settings = settings
        self._vocab_size = vocab_size
        self._on_event = on_event
        self._clock = clock
        self._monitor = Monitor(
            [transport], limits.heartbeat_interval_s, limits.heartbeat_timeout_s, vocab_size, clock
        )
        self._pipeline: Pipeline | None = None
        self._pid = 0
        self._lost_at = float("-inf")
        self._reason = "starting"

    def health(self) -> StageHealth:
        """What is known of the stage, with the reason why it does not draft now, or "". Any thread."""
        (health,) = self._monitor.health()
        return StageHealth(health.name, health.status, self._reason or health.reason, health.asked_at)

    def tick(self, core: Core, now: float) -> None:
        """Time has passed: begin to draft for the core when the stage is ready, and give up when it is lost."""
        healths = self._monitor.health()
        (health,) = healths
        if self._pipeline is None:
            self._reason = self._monitor.problem(healths)
            if not self._reason and health.status is not None and health.asked_at > self._lost_at:
                self._begin(core, health.status)
        elif health.reason:
            self._pipeline.fail(health.name, health.reason)
        elif health.status is not None and health.status.pid != self._pid:
            self._pipeline.fail(health.name, "has restarted")
        if self._pipeline is not None:
            self._pipeline.check_deadlines(now, self._settings.limits.frame_deadline_s)

    def pump(self, core: Core) -> None:
        """Send what the core has to be drafted."""
        pipeline = self._pipeline
        while pipeline is not None and (frame := core.next_draft_frame()) is not None:
            pipeline.submit(frame)

    def handle(self, event: PipelineEvent, core: Core) -> bool:
        """Take an event of this stage's pipeline; False when it is of another one."""
        pipeline = self._pipeline
        if pipeline is None or event.incarnation != pipeline.incarnation:
            return False
        if isinstance(event, FrameDone):
            core.draft_frame_done(event.number, event.statuses, self._clock())
        elif isinstance(event, PipelineFailed):
            log.warning("the draft model is lost: %s: %s", event.stage, event.message)
            self.end(f"lost: {event.message}")
            core.lose_draft_model(self._clock())
        return True

    def end(self, reason: str) -> None:
        """Draft no more, for the core that goes away or because the stage does."""
        pipeline, self._pipeline = self._pipeline, None
        self._reason = reason
        self._lost_at = self._clock()
        if pipeline is not None:
            pipeline.stop(0.0)

    def stop(self) -> None:
        """Ask the stage no more."""
        self._monitor.stop()

    def _begin(self, core: Core, status: StageStatus) -> None:
        if status.pending and self._pid:
            self._reason = "is still busy with a frame of the last pipeline"
            return
        scheduler = self._settings.scheduler
        self._pid = status.pid
        self._pipeline = Pipeline([self._transport], secrets.randbits(63), 1, self._on_event, self._clock)
        limits = DraftLimits(
            context_tokens=status.context_length,
            vocab_size=self._vocab_size,
            max_frame_rows=scheduler.max_frame_rows,
            prefill_rows=scheduler.prefill_rows_while_decoding,
        )
        budget = KvBudget(status.kv_blocks, status.kv_block_tokens)
        core.use_draft_model(DraftPool(budget, limits, self.counters, ahead=self._settings.draft_ahead))

    def to_plain(self) -> dict[str, Any]:
        """Counters by name, for an operator."""
        return {name: getattr(self.counters, name) for name in DraftCounters.__slots__}
