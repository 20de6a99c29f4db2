"""What prefills have taught about the transport of a deployment (spec 3.5).

One pool per deployment, shared by all its requests: each reports once, when its prefill is done, and each
planner starts from what is known. ``estimate()`` and ``seed()`` return nothing until something was observed.
Means are smoothed, so one odd request moves them by a quarter only. Called from one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from skippy_orchestrator.prefill.observations import COMPUTE_FLOOR_MS, PrefillReport, us_to_ms
from skippy_orchestrator.prefill.planner import Planner

_ALPHA: Final = 0.25
"""Weight of a new sample against what is known (spec 10.5)."""


@dataclass(frozen=True, slots=True)
class TransportEstimate:
    """The pool's knowledge: smoothed means, and where the latest prefill was slow."""

    write_ms: float
    """Mean of the longest write of a chunk, milliseconds."""
    wait_ms: float
    """Mean of the longest wait of a chunk, milliseconds."""
    slowest_compute_ms: float
    """Mean compute time of the slowest stage's representative chunk, milliseconds."""
    slowest_compute_ms_per_token: float
    """Mean rate of the slowest stage, milliseconds."""
    write_to_compute: float
    """Mean of write time over compute time."""
    wait_to_compute: float
    """Mean of wait time over compute time."""
    edge_stage: int
    """Stage with the slowest edge, latest prefill."""
    bottleneck_stage: int
    """Slowest stage, latest prefill."""
    bottleneck_tokens: int
    """Tokens of its representative chunk."""
    activation_bytes: int
    """Activation bytes of the slowest edge that a later stage reported, latest prefill."""
    observations: int
    """Edge observations in all, at least one for each prefill."""


class TransportSeed(NamedTuple):
    """The observation a planner starts with: history as a chunk that took 1 ms to compute (spec 3.2)."""

    compute_ms: float
    write_ms: float
    wait_ms: float


class TransportPool:
    """Estimate of one deployment's transport, from all prefills so far."""

    def __init__(self) -> None:
        self._estimate: TransportEstimate | None = None

    def observe(self, report: PrefillReport) -> None:
        """A request's prefill is done; one that prefilled nothing is ignored."""
        sample = _sample(report)
        if sample is None:
            return
        old = self._estimate
        if old is None:
            self._estimate = sample
            return
        self._estimate = replace(
            sample,
            write_ms=_smooth(old.write_ms, sample.write_ms),
            wait_ms=_smooth(old.wait_ms, sample.wait_ms),
            slowest_compute_ms=_smooth(old.slowest_compute_ms, sample.slowest_compute_ms),
            slowest_compute_ms_per_token=_smooth(
                old.slowest_compute_ms_per_token, sample.slowest_compute_ms_per_token
            ),
            write_to_compute=_smooth(old.write_to_compute, sample.write_to_compute),
            wait_to_compute=_smooth(old.wait_to_compute, sample.wait_to_compute),
            observations=old.observations + sample.observations,
        )

    def estimate(self) -> TransportEstimate | None:
        """What is known; None before the first observation."""
        return self._estimate

    def seed(self) -> TransportSeed | None:
        """What a planner is told to have observed before its first chunk; None when nothing is known."""
        if self._estimate is None:
            return None
        return TransportSeed(1.0, self._estimate.write_to_compute, self._estimate.wait_to_compute)

    def prepare(self, planner: Planner) -> None:
        """Start a request's planner from what is known: the ceiling first, then the seed (spec 3.2)."""
        if self._estimate is not None:
            planner.calibrate(self._estimate.slowest_compute_ms_per_token)
        seed = self.seed()
        if seed is not None:
            planner.observe(seed.compute_ms, seed.write_ms, seed.wait_ms)


def _sample(report: PrefillReport) -> TransportEstimate | None:
    """The estimate as it would be from this prefill alone."""
    compute_ms, tokens = report.sample
    if tokens == 0:
        return None
    replies = report.replies
    stage = 0
    later_ms = us_to_ms(replies.compute_us_at_slowest_rate)
    later_tokens = max(replies.compute_token_count_at_slowest_rate, 1)
    if later_ms / later_tokens > compute_ms / tokens:
        compute_ms, tokens, stage = later_ms, later_tokens, replies.compute_stage_index
    compute_ms = max(compute_ms, COMPUTE_FLOOR_MS)
    write_ms = max(report.write_ms_max, us_to_ms(replies.edge_write_us_max))
    wait_ms = max(report.wait_ms_max, us_to_ms(replies.edge_wait_us_max))
    own_edge = us_to_ms(replies.edge_total_us_max) <= report.write_ms_max + report.wait_ms_max
    return TransportEstimate(
        write_ms=write_ms,
        wait_ms=wait_ms,
        slowest_compute_ms=compute_ms,
        slowest_compute_ms_per_token=compute_ms / tokens,
        write_to_compute=write_ms / compute_ms,
        wait_to_compute=wait_ms / compute_ms,
        edge_stage=0 if own_edge else replies.edge_stage_index,
        bottleneck_stage=stage,
        bottleneck_tokens=tokens,
        activation_bytes=replies.edge_activation_bytes_max,
        observations=max(replies.edge_observation_count, 1),
    )


def _smooth(old: float, new: float) -> float:
    return old + _ALPHA * (new - old)
