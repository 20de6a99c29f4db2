"""What is learned from the chunks of one request (spec 2.7, 3.5).

``PrefillStats`` is the prefill part of the stages' reply statistics: the slowest edge and the most telling
compute time among the stages after the first. ``ComputeSample`` is the same for stage 0. What is kept does
not depend on the order of observations, nor on how they were merged, except that among equals the first stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

COMPUTE_FLOOR_MS: Final = 0.001
"""Compute times count as at least this many milliseconds, so that ratios to them exist (spec 10.5)."""


def ms_to_us(ms: float) -> int:
    """Whole microseconds, rounded; 0 for what is not finite or not positive (spec 2.7)."""
    us = ms * 1000
    return math.floor(us + 0.5) if math.isfinite(us) and us > 0 else 0


def us_to_ms(us: int) -> float:
    """Milliseconds."""
    return us / 1000


class ComputeSample(NamedTuple):
    """A compute time and the tokens it was for; 0 tokens: nothing was computed."""

    compute_ms: float = 0.0
    tokens: int = 0


def representative(current: ComputeSample, new: ComputeSample) -> ComputeSample:
    """The sample with the most tokens, on a tie the slower one (spec 3.5).

    So the fixed overhead of a short last chunk does not pass for the stage's rate.
    """
    if (new.tokens, new.compute_ms) > (current.tokens, current.compute_ms):
        return new
    return current


@dataclass(slots=True)
class PrefillStats:
    """Edges and compute times of the stages after the first, merged (spec 2.7). Times are microseconds."""

    edge_write_us_max: int = 0
    """Longest write of a chunk to a stage."""
    edge_wait_us_max: int = 0
    """Longest wait for a stage; may be of another observation than the longest write."""
    edge_total_us_max: int = 0
    """Longest write and wait together, of one observation."""
    edge_stage_index: int = 0
    """Stage of that observation."""
    edge_activation_bytes_max: int = 0
    """Activation bytes of that observation."""
    edge_observation_count: int = 0
    """Edge observations."""
    compute_us_at_slowest_rate: int = 0
    """Compute time of the representative sample; 0 when there is none."""
    compute_token_count_at_slowest_rate: int = 0
    """Tokens of that sample."""
    compute_stage_index: int = 0
    """Stage of that sample."""
    compute_observation_count: int = 0
    """Compute observations, those that did not win included."""

    @property
    def empty(self) -> bool:
        """True when nothing was observed."""
        return not (self.edge_observation_count or self.compute_observation_count)

    def observe_edge(self, stage: int, write_us: int, wait_us: int, activation_bytes: int) -> None:
        """One chunk was written to a stage and waited for; negative times count as 0."""
        write_us, wait_us = max(write_us, 0), max(wait_us, 0)
        total_us = write_us + wait_us
        self._merge_edge(write_us, wait_us, total_us, stage, activation_bytes)
        self.edge_observation_count += 1

    def observe_compute(self, stage: int, compute_us: int, tokens: int) -> None:
        """A stage computed a chunk; counts as at least 0 microseconds and 1 token."""
        self._merge_compute(max(compute_us, 0), max(tokens, 1), stage)
        self.compute_observation_count += 1

    def merge(self, other: PrefillStats) -> None:
        """Take in what another block has seen."""
        self._merge_edge(
            other.edge_write_us_max,
            other.edge_wait_us_max,
            other.edge_total_us_max,
            other.edge_stage_index,
            other.edge_activation_bytes_max,
        )
        self.edge_observation_count += other.edge_observation_count
        self._merge_compute(
            other.compute_us_at_slowest_rate,
            other.compute_token_count_at_slowest_rate,
            other.compute_stage_index,
        )
        self.compute_observation_count += other.compute_observation_count

    def _merge_edge(
        self, write_us: int, wait_us: int, total_us: int, stage: int, activation_bytes: int
    ) -> None:
        self.edge_write_us_max = max(self.edge_write_us_max, write_us)
        self.edge_wait_us_max = max(self.edge_wait_us_max, wait_us)
        if total_us > self.edge_total_us_max:
            self.edge_total_us_max = total_us
            self.edge_stage_index = stage
            self.edge_activation_bytes_max = activation_bytes

    def _merge_compute(self, compute_us: int, tokens: int, stage: int) -> None:
        if compute_us <= 0 or tokens <= 0:
            return  # says nothing about a rate
        current_us = self.compute_us_at_slowest_rate
        current_tokens = self.compute_token_count_at_slowest_rate
        nothing_yet = current_us <= 0 or current_tokens <= 0
        if nothing_yet or (tokens, compute_us) > (current_tokens, current_us):
            self.compute_us_at_slowest_rate = compute_us
            self.compute_token_count_at_slowest_rate = tokens
            self.compute_stage_index = stage


class PrefillReport(NamedTuple):
    """What one request's prefill tells the transport pool (spec 3.5). Times are milliseconds."""

    sample: ComputeSample
    """Representative chunk of stage 0; 0 tokens when nothing was prefilled."""
    write_ms_max: float
    """Longest write of a chunk by stage 0."""
    wait_ms_max: float
    """Longest wait for a credit, the final drain included."""
    replies: PrefillStats
    """What the other stages reported."""
