"""What a deployment learns and counts beyond the life of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from skippy_orchestrator.deployment import PrefixCacheSection
from skippy_orchestrator.prefill import PrefillSummary, TransportPool
from skippy_orchestrator.prefix.cache import PrefixMemory
from skippy_orchestrator.prefix.outcome import CacheStats, HitKind
from skippy_orchestrator.speculation.counters import SpeculationCounters


@dataclass(slots=True)
class CoreCounters:
    """Totals since the start."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    """Of finished requests; ``cached_tokens`` of them were not computed."""
    output_tokens: int = 0
    frames: int = 0
    prefix_queries: int = 0
    """Sessions that asked the stages what could be restored."""
    prefix_hits: int = 0
    hits_exact_replay: int = 0
    hits_full_prompt_first_token: int = 0
    hits_fused_exact_prefix: int = 0
    hits_prefix: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    """Output tokens that were served without computing."""
    prefill_chunks: int = 0
    credit_waits: int = 0
    """Chunks that had to wait for a credit."""
    credit_wait_ms: float = 0.0
    credits_max: int = 0
    """Most credits that one prompt had out."""
    credit_drains: int = 0
    """Credits that were out when the last chunk of their prompt was sent."""

    def count_cache(self, stats: CacheStats, replayed: int) -> None:
        """A session with this record has finished; ``replayed`` of its output tokens were known."""
        self.cached_tokens += stats.cached_prompt_tokens
        self.replayed_tokens += replayed
        match stats.hit_kind:
            case HitKind.EXACT_REPLAY:
                self.hits_exact_replay += 1
            case HitKind.FULL_PROMPT_FIRST_TOKEN:
                self.hits_full_prompt_first_token += 1
            case HitKind.FUSED_EXACT_PREFIX:
                self.hits_fused_exact_prefix += 1
            case HitKind.PREFIX:
                self.hits_prefix += 1

    def count_prefill(self, summary: PrefillSummary) -> None:
        """A prompt has been computed."""
        self.prefill_chunks += summary.chunks
        self.credit_waits += summary.credit_waits
        self.credit_wait_ms += summary.credit_wait_ms
        self.credits_max = max(self.credits_max, summary.pending_max)
        self.credit_drains += summary.drains


@dataclass(slots=True)
class History:
    """Counters, the transport estimate that all requests share, and what is known of outputs."""

    prefixes: PrefixMemory
    counters: CoreCounters = field(default_factory=CoreCounters)
    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)
    """Of requests that have finished."""
    transport: TransportPool = field(default_factory=TransportPool)

    @classmethod
    def of(cls, section: PrefixCacheSection) -> History:
        """An empty one."""
        return cls(PrefixMemory.of(section))
