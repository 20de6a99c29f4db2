"""The lengths of a prompt at which the prefix cache looks and records (spec 3.4, 4.3, 4.7).

Resident KV matches at any length, so these lengths matter to exact states alone: such a state can be used only
where it was saved, and a prompt that shares a beginning with an earlier one has to meet it at a length that both
of them choose. All lengths are in tokens from the start of the prompt.
"""

from __future__ import annotations

from typing import Final

_BUDGET_FROM_CONTEXT: Final = 8192
"""The smallest context, in tokens, of which resident prefixes may take only half (spec 4.8)."""


def resident_budget(context_tokens: int) -> int:
    """Tokens that the ladder of recorded lengths may pin; 0 is no limit (spec 4.8)."""
    return context_tokens // 2 if context_tokens >= _BUDGET_FROM_CONTEXT else 0


def lookup_lengths(tokens: int, min_tokens: int, stride: int) -> tuple[int, ...]:
    """The lengths to look up for so many tokens, longest first (spec 4.3).

    All tokens, then a grid down to ``min_tokens``. It is never coarser than ``min_tokens``.
    """
    if tokens == 0:
        return ()
    if min_tokens == 0 or tokens <= min_tokens:
        return (tokens,)
    stride = min(max(stride, 1), min_tokens)
    near_tail = (tokens - 1) // stride * stride
    return (tokens, *range(near_tail, min_tokens, -stride), min_tokens)


def record_lengths(tokens: int, min_tokens: int, stride: int, limit: int, budget: int = 0) -> tuple[int, ...]:
    """At most ``limit`` of the lengths to look up, longest first; 0 takes them all (spec 4.3).

    All tokens, then the longest length on the grid, then a geometric ladder between the two ends, so that a
    prompt that leaves this one anywhere meets a record not far below. The ladder ends at the step with which its
    lengths together would exceed ``budget`` tokens; 0 is no budget.
    """
    lengths = lookup_lengths(tokens, min_tokens, stride)
    if limit == 0 or len(lengths) <= limit:
        return lengths
    chosen, free = list(lengths[: min(limit, 2)]), list(lengths[2:])
    slots = limit - 2
    lowest = min(max(min_tokens, 1), tokens)
    pinned = 0
    for slot in range(1, slots + 1):
        target = round(lowest * (tokens / lowest) ** (slot / (slots + 1)))
        nearest = min(free, key=lambda length: abs(length - target))
        pinned += nearest
        if 0 < budget < pinned:
            break
        chosen.append(nearest)
        free.remove(nearest)
    return tuple(sorted(chosen, reverse=True))


def shared_checkpoint(tokens: int, min_tokens: int, stride: int) -> int | None:
    """Where prompts that differ only in a short tail are likely to agree, or None (spec 4.7).

    One stride below the last point of the grid, so that a tail of up to a stride doesn't spoil it. The stride is
    the configured one, not the one capped by ``min_tokens`` (spec 13.2 leaves that open).
    """
    if tokens <= min_tokens:
        return None
    near = tokens - tokens % stride
    length = max(near - stride, min_tokens)
    return length if 0 < length < tokens else None


def exact_boundary(
    n_prefill: int, restored: int, min_tokens: int, stride: int, chat_prefix: int = 0
) -> int | None:
    """The one boundary of the spec at which a chunk has to end, or None (spec 3.4).

    Asked for models with exact states only. ``n_prefill`` is ``P = n_prompt - 1``, ``chat_prefix`` the length of
    the conversation that its next turn will begin with, 0 where that is not known. A boundary lies strictly
    between what was restored and the end.
    """
    shared = shared_checkpoint(n_prefill, min_tokens, stride)
    for length in (shared, chat_prefix):
        if length is not None and restored < length < n_prefill:
            return length
    return None


def exact_boundaries(
    n_prefill: int, restored: int, min_tokens: int, stride: int, limit: int, chat_prefix: int = 0
) -> tuple[int, ...]:
    """All lengths strictly inside the prefill at which a chunk ends and the exact state is recorded, ascending.

    The boundary of the spec, the end of a conversation whose next turn will begin with it even where the spec
    prefers the shared checkpoint, and every length to record (at most ``limit`` of them, the end included) that the
    spec would take from a finished prefill: a recurrent state can't be cut back, so the only time to save it is
    when the prefill is just there.
    """
    recorded = record_lengths(n_prefill, min_tokens, stride, limit)
    inside = {length for length in recorded if restored < length < n_prefill}
    boundary = exact_boundary(n_prefill, restored, min_tokens, stride, chat_prefix)
    if boundary is not None:
        inside.add(boundary)
    if restored < chat_prefix < n_prefill:
        inside.add(chat_prefix)
    return tuple(sorted(inside))
