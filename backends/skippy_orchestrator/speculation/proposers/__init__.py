"""N-gram proposers: drafts copied from what a text already holds, one proposer for every request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skippy_orchestrator.deployment.speculation import NgramSection
from skippy_orchestrator.speculation.proposers.cache import CacheProposer
from skippy_orchestrator.speculation.proposers.simple import SimpleProposer
from skippy_orchestrator.speculation.proposers.statistics import ProposerStats
from skippy_orchestrator.speculation.proposers.suffix import SuffixProposer


class Proposer(Protocol):
    """Guesses what follows a text."""

    name: str
    stats: ProposerStats

    def follow(self, history: Sequence[int]) -> None:
        """Index what is new in the committed tokens."""
        ...

    def propose(self, continuation: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` tokens that may follow the history and ``continuation``, which is not indexed."""
        ...


def make_proposer(section: NgramSection) -> Proposer:
    """The proposer that a plan asks for."""
    limits = (section.min_ngram, section.max_ngram, section.max_proposal_tokens)
    match section.kind:
        case "suffix":
            return SuffixProposer(*limits, resume=section.resume)
        case "cache":
            return CacheProposer(*limits)
        case "simple":
            return SimpleProposer(*limits)
