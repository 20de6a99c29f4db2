"""Proposals: what a head has drafted, continued by n-grams (spec 7.8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippy_orchestrator.speculation.proposers import Proposer


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next; the first ``native`` of them are the head's."""

    tokens: tuple[int, ...]
    native: int = 0
    span_available: bool = False
    """Whether n-grams had anything to add, even if it was too short."""


def ngram_limit(horizon: int, available: int) -> int:
    """Tokens that n-grams may add to where ``available`` still fit: none where fewer than two do."""
    return 0 if horizon < 2 or available < 2 else min(available, horizon)


def compose(
    native: Sequence[int], max_total: int, max_ngram: int, horizon: int, proposer: Proposer | None
) -> Proposal:
    """The head's tokens and an n-gram tail, together at most ``max_total`` tokens.

    ``horizon`` 0 is without n-grams. A tail of a single token is dropped unless no longer one was allowed.
    """
    head = tuple(native[:max_total])
    limit = min(max_total - len(head), horizon, max_ngram)
    if proposer is None or limit <= 0:
        return Proposal(head, len(head))
    tail = proposer.propose(head, limit)[:limit]
    used = tail if len(tail) >= min(2, max_ngram) else []
    return Proposal((*head, *used), len(head), bool(tail))
