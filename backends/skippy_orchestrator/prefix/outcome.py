"""What the prefix cache does for one request: which ways are open, which one is taken, what is reported.

Everything here is a pure decision. The stages say which lengths of a token list they could restore,
``choose_restore`` takes the best way that is open to all of them together (spec 4.5), and ``CacheStats`` is the
record that the client gets (spec 4.5, 4.10, 11).

Invariants:

* A plan restores a length that every stage has, so a restore is all or nothing (I16).
* A plan with tokens restores exactly the positions in front of the last of them; one without restores at
  most ``P = n_prompt - 1`` positions, so that there is a row left that predicts.
* Nothing shorter than ``min_tokens`` is a hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec
from skippy_stage.protocol import Restorable

from skippy_orchestrator.deployment import PrefixCacheSection

_ACTIVATION_BYTES: Final = 4
"""Bytes of one hidden value in the savings, whatever the links' type (spec 4.10)."""


class CacheStatus(StrEnum):
    """What became of a request at the prefix cache (spec 11)."""

    DISABLED = "disabled"
    MISS = "miss"
    HIT = "hit"
    BYPASS_NATIVE_MTP = "bypass_native_mtp"


class HitKind(StrEnum):
    """The way in which a restore was used, best first (spec 4.5)."""

    EXACT_REPLAY = "chain_exact_replay"
    """The prompt and output tokens behind it: the known output is served without computing."""
    FULL_PROMPT_FIRST_TOKEN = "chain_full_prompt_first_token"
    """The whole prompt, and its first output token is known."""
    FUSED_EXACT_PREFIX = "chain_fused_exact_prefix"
    """All of the prompt but its last token: the restore rides with the first decode."""
    PREFIX = "chain_prefix"
    """A part of the prompt."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which ways of spec 4.5 are open to a request."""

    status: CacheStatus
    """What the request reports unless it is a hit."""
    restore: bool = False
    """Whether the stages are asked at all."""
    fused: bool = False
    """Whether a restore of all but the last prompt token counts as fused with the first decode."""
    first_token: bool = False
    """Whether a known first token may be served."""
    replay: bool = False
    """Whether several known output tokens may be served."""


CLOSED: Final = Lookup(CacheStatus.DISABLED)
"""No way is open: there is no cache, or nothing that it could do."""


def lookup_bypass(
    settings: PrefixCacheSection,
    native_mtp: bool,
    draft_model: bool,
    *,
    n_prompt: int,
    replay_safe: bool,
) -> Lookup:
    """Which ways are open (spec 4.4).

    ``native_mtp`` and ``draft_model`` say what the request drafts with. Requests with native MTP restore like
    all others, because the state of the MTP head is recorded as one more layer; ``bypass_native_mtp`` brings the
    rule of the spec back, which restores nothing for them. Recording goes on in either case.
    ``replay_safe`` is what fingerprint.replay_safe says of the request.
    """
    if settings.mode == "disabled" or n_prompt < 2:
        return CLOSED
    if native_mtp and settings.bypass_native_mtp:
        return Lookup(CacheStatus.BYPASS_NATIVE_MTP)
    if settings.mode == "record":
        return Lookup(CacheStatus.MISS)
    known_output = replay_safe and not draft_model
    return Lookup(
        CacheStatus.MISS,
        restore=True,
        fused=not draft_model,
        first_token=known_output and settings.replay_tokens >= 1,
        replay=known_output and settings.replay_tokens >= 2,
    )


class RestorePlan(NamedTuple):
    """What is restored for a request, on all stages."""

    length: int = 0
    """Positions, on every stage; 0 is a miss."""
    kind: HitKind | None = None
    """None is a miss."""
    tokens: tuple[int, ...] = ()
    """Output tokens that are served without computing; all but the last of them are restored positions."""

    def cached_prompt_tokens(self, n_prompt: int) -> int:
        """Prompt tokens that are not computed again."""
        return min(self.length, n_prompt)


MISS: Final = RestorePlan()


def choose_restore(
    n_prompt: int,
    restorable: Restorable,
    cached_tokens: tuple[int, ...],
    min_tokens: int,
    max_tokens: int,
    *,
    fused: bool = True,
) -> RestorePlan:
    """Take the best way to use what all stages can restore (the order of spec 4.5).

    ``restorable`` is what all stages have in common of ``prompt + cached_tokens[:-1]``. ``cached_tokens`` are the
    output tokens known for the prompt, as many as the request may be served; ``max_tokens`` is the request's own
    limit. Without ``fused`` a restore of ``P`` positions is an ordinary prefix.
    """
    prefill = n_prompt - 1
    if prefill < 1:
        return MISS
    if n_prompt >= min_tokens:
        for count in range(min(len(cached_tokens), max_tokens), 0, -1):
            length = prefill + count
            if restorable.best(length) == length:
                kind = HitKind.EXACT_REPLAY if count > 1 else HitKind.FULL_PROMPT_FIRST_TOKEN
                return RestorePlan(length, kind, cached_tokens[:count])
    length = restorable.best(prefill)
    if length < max(min_tokens, 1):
        return MISS
    whole = fused and length == prefill
    return RestorePlan(length, HitKind.FUSED_EXACT_PREFIX if whole else HitKind.PREFIX)


class Savings(NamedTuple):
    """What a restore spared (spec 4.10)."""

    hit_stage_count: int
    stage0_bytes_avoided: int
    interstage_bytes_avoided_estimate: int


def savings(restored: int, hidden_size: int, hit_mask: int) -> Savings:
    """Count what was spared: ``restored`` positions, ``hit_mask`` with bit i for stage i."""
    stages = hit_mask.bit_count() if hit_mask > 0 else 0
    stage0 = restored * hidden_size * _ACTIVATION_BYTES
    return Savings(stages, stage0, stage0 * max(stages - 1, 0))


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache did for one request (spec 4.5, 4.10, 11); times in milliseconds."""

    status: CacheStatus = CacheStatus.DISABLED
    hit_kind: HitKind | None = None
    cached_prompt_tokens: int = 0
    """Prompt tokens that were not computed again."""
    matched_prefix_tokens: int = 0
    """Prompt tokens of the prefix that matched."""
    suffix_prefill_tokens: int = 0
    """Prefill tokens that were computed, of the ``P = n_prompt - 1``."""
    restored_tokens: int = 0
    """Positions that were restored, those of output tokens included."""
    restore_ms: float = 0.0
    """From the question to the stages to their last answer; 0 without a hit."""
    prompt_ms: float = 0.0
    """From the admission to the first token."""
    predicted_ms: float = 0.0
    """From the first token to the last."""
    hit_stage_count: int = 0
    stage0_bytes_avoided: int = 0
    """Bytes of hidden rows, as 32-bit values, that stage 0 did not compute."""
    interstage_bytes_avoided_estimate: int = 0
    """The same for all links between stages."""

    def to_json(self) -> str:
        """The record as one JSON object; times to a microsecond."""
        plain = msgspec.to_builtins(self)
        rounded = {key: round(value, 3) if type(value) is float else value for key, value in plain.items()}
        return msgspec.json.encode(rounded).decode()


def stats_of(
    lookup: Lookup,
    plan: RestorePlan,
    n_prompt: int,
    *,
    hidden_size: int,
    hit_mask: int,
    restore_ms: float,
) -> CacheStats:
    """The record of a request after its restore; prompt_ms and predicted_ms are set when they are known."""
    prefill = n_prompt - 1
    if plan.kind is None:
        return CacheStats(status=lookup.status, suffix_prefill_tokens=prefill)
    cached = plan.cached_prompt_tokens(n_prompt)
    spared = savings(plan.length, hidden_size, hit_mask)
    return CacheStats(
        status=CacheStatus.HIT,
        hit_kind=plan.kind,
        cached_prompt_tokens=cached,
        matched_prefix_tokens=cached,
        suffix_prefill_tokens=max(prefill - cached, 0),
        restored_tokens=plan.length,
        restore_ms=restore_ms,
        hit_stage_count=spared.hit_stage_count,
        stage0_bytes_avoided=spared.stage0_bytes_avoided,
        interstage_bytes_avoided_estimate=spared.interstage_bytes_avoided_estimate,
    )
