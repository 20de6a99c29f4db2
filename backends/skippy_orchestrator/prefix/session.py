"""One session's dealings with the prefix caches: probe, choice, restore, records (spec 4.5, 4.7).

Plain state: events and times in, decisions out. The order of a session's life is

1. ``probe_tokens``: what to ask the stages for, unless it is known that they cannot have it;
2. ``answered``: what all of them have in common decides what is restored and which tokens are known;
3. ``take_restore``: the length that rides with the first rows, once;
4. ``record_after`` and ``record_at_end``: which committed lengths are worth keeping.

Nothing here names a length above what is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from skippy_stage.protocol import Restorable

from skippy_orchestrator.prefix.candidates import exact_boundaries
from skippy_orchestrator.prefix.outcome import (
    CLOSED,
    MISS,
    CacheStats,
    Lookup,
    RestorePlan,
    choose_restore,
    stats_of,
)
from skippy_orchestrator.prefix.output_tokens import OutputKey


@dataclass(frozen=True, slots=True)
class PrefixTerms:
    """What holds for one session; made when it is admitted."""

    lookup: Lookup = CLOSED
    """Which ways of reuse are open to the request."""
    namespace: str = ""
    probes: bool = False
    """The stages are asked: reuse is allowed, and they may have something."""
    outputs: tuple[int, ...] = ()
    """Output tokens known for this prompt and sampling, to be served if their positions can be restored."""
    output_key: OutputKey | None = None
    """Under which name the request's first output tokens are kept; None when they are not."""
    records: bool = False
    record_output: bool = False
    exact: bool = False
    """A stage holds states that can't be cut: only whole recorded lengths can be restored."""
    speculate_after_restore: bool = True
    """N-grams are asked even when the whole prefill was restored."""
    chat_prefix: int = 0
    """Prompt tokens that the next turn of the conversation will begin with too."""
    min_tokens: int = 1
    stride_tokens: int = 1
    record_limit: int = 0
    stages: int = 1
    hidden_size: int = 0


OFF = PrefixTerms()


class SessionPrefix:
    """What one session restores and records."""

    def __init__(self, prompt: Sequence[int], max_tokens: int, terms: PrefixTerms, now: float) -> None:
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._terms = terms
        self.plan = MISS
        self._pending = 0
        self._recorded = 0
        self._boundaries: tuple[int, ...] = ()
        self._started_at = now
        self._probed_at = now
        self._restored_at: float | None = None
        self._first_token_at: float | None = None

    @property
    def namespace(self) -> str:
        """What separates prefixes that must not be shared."""
        return self._terms.namespace

    @property
    def output_key(self) -> OutputKey | None:
        """Under which name the request's first output tokens are kept; None when they are not."""
        return self._terms.output_key

    @property
    def cuts(self) -> bool:
        """Whether the session's state can be cut back on all stages, as drafts that turn out wrong need it."""
        return not self._terms.exact

    @property
    def keeps_ngrams(self) -> bool:
        """Whether n-gram proposers run for the request, now that it is known what it restores."""
        return self._terms.speculate_after_restore or self.plan.length < len(self._prompt) - 1

    @property
    def probes(self) -> bool:
        """Whether the stages are to be asked at all."""
        return self._terms.probes

    @property
    def probe_tokens(self) -> Sequence[int]:
        """The prompt, and the known output tokens whose positions would have to be there too."""
        return [*self._prompt, *self._terms.outputs[:-1]]

    @property
    def recorded(self) -> int:
        """The longest length that was restored, or that stages were asked to record."""
        return self._recorded

    def probed(self, now: float) -> None:
        """The question is on its way."""
        self._probed_at = now

    def answered(self, restorable: Restorable, now: float) -> RestorePlan:
        """All stages have answered: what is restored, and the output tokens that are known with it."""
        terms = self._terms
        self.plan = choose_restore(
            *(len(self._prompt), restorable, terms.outputs, terms.min_tokens, self._max_tokens),
            fused=terms.lookup.fused,
        )
        self._pending = self._recorded = self.plan.length
        if self.plan.length:
            self._restored_at = now
        return self.plan

    def take_restore(self) -> int:
        """The length to restore before the rows that are being sent; 0 when there is nothing (left) to do."""
        length, self._pending = self._pending, 0
        return length

    def boundaries(self) -> tuple[int, ...]:
        """Positions at which a chunk must end because state can be kept only as it is (spec 3.4)."""
        if self._terms.exact and self._terms.records:
            terms, last = self._terms, len(self._prompt) - 1
            inner = exact_boundaries(
                *(last, self.plan.length, terms.min_tokens, terms.stride_tokens, terms.record_limit),
                chat_prefix=terms.chat_prefix,
            )
            # The same prompt again restores up to its last token, so that state is worth a chunk's end too.
            self._boundaries = (*inner, last)
        return self._boundaries

    def record_after(self, start: int, end: int) -> int:
        """The length to record behind a chunk ``[start, end)``; 0 for none."""
        whole = end == len(self._prompt)
        wanted = end in self._boundaries if self._terms.exact and not whole else whole or start == 0
        return self._record(end) if wanted and self.plan.length < len(self._prompt) - 1 else 0

    def record_at_end(self, length: int) -> int:
        """The length to record of a session that is over and has ``length`` committed positions."""
        return self._record(length if self._terms.record_output else min(length, len(self._prompt)))

    def _record(self, length: int) -> int:
        if not self._terms.records or length < self._terms.min_tokens or length <= self._recorded:
            return 0
        self._recorded = length
        return length

    def first_token(self, now: float) -> None:
        """The first token was committed."""
        if self._first_token_at is None:
            self._first_token_at = now

    def stats(self, now: float) -> CacheStats:
        """What the caches did for this session, at its end."""
        terms = self._terms
        first = self._first_token_at if self._first_token_at is not None else now
        restored_at = self._restored_at if self._restored_at is not None else self._probed_at
        stats = stats_of(
            terms.lookup,
            self.plan,
            len(self._prompt),
            hidden_size=terms.hidden_size,
            hit_mask=(1 << terms.stages) - 1,
            restore_ms=_ms(restored_at - self._probed_at),
        )
        return msgspec.structs.replace(
            stats, prompt_ms=_ms(first - self._started_at), predicted_ms=_ms(now - first)
        )


def _ms(seconds: float) -> float:
    return seconds * 1000
