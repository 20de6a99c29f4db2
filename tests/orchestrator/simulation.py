"""A whole deployment in one process, in virtual time: the core, the frames' way, and stage runtimes.

Every frame that a stage executes takes a millisecond. No thread and no clock: ``advance(stage)`` lets one stage
execute one frame, so a test (or hypothesis) decides in which order everything happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from skippy_orchestrator.core import Core, Failure
from skippy_orchestrator.deployment import (
    LimitsSection,
    PrefillSection,
    PrefixCacheSection,
    SchedulerSection,
    SpeculationPlan,
)
from skippy_orchestrator.frames import Frame, StageReport
from skippy_orchestrator.history import History
from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.pipeline.flight import Flight
from skippy_orchestrator.prefix.cache import PrefixCache, StageFacts
from skippy_orchestrator.prefix.outcome import CacheStats
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.speculation.counters import SpeculationCounters
from skippy_orchestrator.speculation.draft_model import DraftCounters, DraftLimits, DraftPool
from skippy_orchestrator.speculation.options import NO_SPECULATION
from skippy_stage.errors import SkippyError
from skippy_stage.prefix.activations import ActivationCache
from skippy_stage.prefix.factory import make_prefix_store
from skippy_stage.prefix.resident import ResidentPrefixes
from skippy_stage.protocol import FrameHeader, SamplingParams, StepSkipped, decode_request, encode
from skippy_stage.runtime import StageRuntime

from tests.scripted import VOCAB, RecurrentEngine, ScriptedEngine, cut


class TokenText:
    """Text that shows every token as one character; a token may be a stop."""

    def __init__(self, stop: int | None = None) -> None:
        self._stop = stop

    def push(self, token: int) -> tuple[str, bool]:
        if token == self._stop:
            return "", True
        return chr(0x100 + token), False

    def flush(self) -> str:
        return ""


@dataclass
class Seen:
    """What a client has got."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: SkippyError | None = None
    cache: CacheStats | None = None
    speculation: SpeculationCounters | None = None

    @property
    def ended(self) -> bool:
        return bool(self.finish_reason) or self.error is not None


OFF = PrefixCacheSection(mode="disabled")


class Simulation:
    """Core and stages, advanced by hand. ``history`` and ``engines`` may be those of an earlier one."""

    def __init__(
        self,
        stages: int = 2,
        *,
        scheduler: SchedulerSection | None = None,
        prefill: PrefillSection | None = None,
        limits: LimitsSection | None = None,
        blocks: int = 4096,
        end_tokens: frozenset[int] = frozenset(),
        engines: Sequence[ScriptedEngine | RecurrentEngine] | None = None,
        prefix: PrefixCacheSection = OFF,
        activation_bytes: int = 0,
        draft: ScriptedEngine | None = None,
        draft_ahead: bool = True,
    ) -> None:
        self.now = 0.0
        self.drafts_late = True
        """Whether the core gets to send frames between a result and its drafts."""
        scheduler = scheduler or SchedulerSection()
        self.engines = list(engines or cut(stages, blocks=blocks))
        self.prefix = prefix
        payload = "off" if prefix.mode == "disabled" else prefix.payload
        self.stores = [
            make_prefix_store(engine, payload, max_entries=prefix.max_entries, max_bytes=prefix.max_bytes)
            for engine in self.engines
        ]
        self.runtimes: list[StageRuntime[Flight]] = [
            StageRuntime(
                engine,
                f"stage_{i}",
                i,
                clock=lambda: self.now,
                prefixes=self.stores[i],
                activations=ActivationCache(activation_bytes),
                identity=f"scripted-{i}",
            )
            for i, engine in enumerate(self.engines)
        ]
        self.history = History.of(prefix)
        self.core = Core(
            len(self.engines),
            KvBudget(blocks, self.engines[0].info.kv_block_tokens),
            end_tokens,
            scheduler,
            prefill or PrefillSection(policy="fixed", chunk_tokens=8),
            limits or LimitsSection(),
            PrefixCache(
                prefix, "test", StageFacts.of([r.status() for r in self.runtimes]), self.history.prefixes
            ),
            self.history,
        )
        self.draft: StageRuntime[Frame] | None = None
        self.draft_engine = draft
        self.draft_counters = DraftCounters()
        if draft is not None:
            self.draft = StageRuntime(draft, "draft", 0, clock=lambda: self.now)
            pool = DraftPool(
                KvBudget(draft.info.kv_blocks, draft.info.kv_block_tokens),
                DraftLimits(
                    draft.info.context_length,
                    VOCAB,
                    scheduler.max_frame_rows,
                    scheduler.prefill_rows_while_decoding,
                ),
                self.draft_counters,
                ahead=draft_ahead,
            )
            self.core.use_draft_model(pool)
        self.names = [f"stage_{i}" for i in range(len(self.engines))]
        self.seen: dict[int, Seen] = {}
        self.headers: list[tuple[int, FrameHeader]] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.skipped = 0
        """Steps that came back without having been executed."""

    def submit(
        self,
        session: int,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        sampling: SamplingParams | None = None,
        ignore_eos: bool = False,
        stop: int | None = None,
        cache_key: str = "",
        seeded: bool = True,
        speculation: SpeculationPlan = NO_SPECULATION,
    ) -> Seen:
        request = GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            stream=True,
            ignore_eos=ignore_eos,
            stop_words=(),
            cache_key=cache_key,
            speculation=speculation,
            seeded=seeded,
        )
        self.seen[session] = Seen()
        try:
            self.core.submit(session, request, TokenText(stop), self.now)
        except SkippyError as error:
            self.seen[session].error = error
        self.pump()
        return self.seen[session]

    def cancel(self, session: int) -> None:
        self.core.cancel(session, self.now)
        self.pump()

    def forget(self, stage: int) -> None:
        """Let a stage evict all that nobody leases."""
        store = self.stores[stage]
        if isinstance(store, ResidentPrefixes):
            before = -1
            while store.status().entries != before:
                before = store.status().entries
                store.reclaim(1 << 30)

    def pump(self) -> None:
        """Send what can be sent and note what the core has to say."""
        while self.draft is not None and (frame := self.core.next_draft_frame()) is not None:
            header = FrameHeader(incarnation=8, frame=frame.number, steps=frame.steps)
            self.draft.accept(header, np.array(frame.tokens, np.int32), None, frame)
        while (frame := self.core.next_frame(self.now)) is not None:
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            self._send(Flight(frame, self.names))
        for output in self.core.take_outputs():
            seen = self.seen[output.session]
            assert not seen.ended, "something was said after the end"
            if isinstance(output, Failure):
                seen.error = output.error
            else:
                seen.tokens.extend(output.tokens)
                seen.text += output.text
                seen.finish_reason = output.finish_reason
                seen.cache = output.cache
                seen.speculation = output.speculation

    def _send(self, flight: Flight) -> None:
        header = decode_request(encode(flight.header(7, 1)))
        assert isinstance(header, FrameHeader)
        self.headers.append((flight.stage, header))
        self.runtimes[flight.stage].accept(header, flight.tokens(), flight.hidden, flight)

    def advance(self, stage: int) -> bool:
        """Let one stage execute the frame that is next; False when it has none."""
        queued = self.runtimes[stage].take(timeout=0)
        if queued is None:
            return False
        result, hidden = self.runtimes[stage].execute(queued)
        self.now += 0.001
        flight = queued.reply
        report = StageReport(result.rows, compute_us=1000, call_us=1000)
        flight.advance(result, hidden)
        if not flight.done:
            self.core.frame_left_stage(flight.frame.number, stage, report, self.now)
            self._send(flight)
        else:
            self.in_flight -= 1
            self.skipped += sum(isinstance(status, StepSkipped) for status in flight.statuses)
            self.core.frame_done(
                flight.frame.number, flight.statuses, report, self.now, drafts_follow=result.drafts_follow
            )
            if self.drafts_late:
                self.pump()
            drafts = self.runtimes[stage].draft(queued)
            if drafts is not None:
                self.now += 0.001
                self.core.frame_drafted(drafts.drafts, self.now)
        self.pump()
        return True

    def advance_draft(self) -> bool:
        """Let the draft model execute its frame; False when it has none."""
        queued = self.draft.take(timeout=0) if self.draft is not None else None
        if queued is None or self.draft is None:
            return False
        result, _ = self.draft.execute(queued)
        self.now += 0.001
        self.core.draft_frame_done(queued.reply.number, result.statuses, self.now)
        self.pump()
        return True

    def lose_draft(self) -> None:
        """The draft model's stage dies."""
        self.draft = self.draft_engine = None
        self.core.lose_draft_model(self.now)
        self.pump()

    def run(self) -> None:
        """Advance all stages in turn until nothing moves, then check that nothing was left behind."""
        waiting = deque([*range(len(self.runtimes)), -1])
        still = 0
        while still < len(waiting):
            waiting.rotate(-1)
            moved = self.advance_draft() if waiting[0] < 0 else self.advance(waiting[0])
            still = 0 if moved else still + 1
        self.check_integrity()

    def check_integrity(self) -> None:
        self.core.check_integrity()
        for runtime in [*self.runtimes, self.draft]:
            if runtime is not None:
                runtime.check_integrity()

    def check_empty(self) -> None:
        """Every session has ended: no stage, list or budget holds anything."""
        self.run()
        assert self.core.idle
        for engine in [*self.engines, *([self.draft_engine] if self.draft_engine else [])]:
            usage = engine.usage()
            assert usage.cached == {}, "a stage still holds a session"
            assert usage.blocks_used == 0, "a stage holds blocks for nobody"
        assert all(runtime.status().prefix.leases == 0 for runtime in self.runtimes), "a lease was left"
