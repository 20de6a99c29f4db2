"""What a proposer did for one request (spec 7.8)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ProposerStats:
    """Counters; the time that calls take is measured by who makes them."""

    attempts: int = 0
    hits: int = 0
    """Attempts that proposed anything."""
    proposed_tokens: int = 0
    match_length_sum: int = 0
    match_length_max: int = 0
    candidates_examined: int = 0
    appended_tokens: int = 0
    rebuilds: int = 0

    def hit(self, tokens: int, match: int) -> None:
        """So many tokens were proposed on the ground of a match of this length."""
        self.hits += 1
        self.proposed_tokens += tokens
        self.match_length_sum += match
        self.match_length_max = max(self.match_length_max, match)
