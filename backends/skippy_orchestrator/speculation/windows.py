"""Verify windows in flight: ids, order, depth, and how many there were at a time (spec 7.5)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


class WindowError(Exception):
    """Windows were opened beyond the depth, or came back out of order."""


@dataclass(slots=True)
class WindowStats:
    """Counters of one request's windows; times in seconds."""

    opened: int = 0
    max_in_flight: int = 0
    recovery_epochs: int = 0
    stale_marked: int = 0
    refill_attempts: int = 0
    refill_successes: int = 0
    refill_tokens: int = 0
    refill_misses: int = 0
    occupancy_s: list[float] = field(default_factory=list)
    """How long exactly k windows were in flight, for k from 0 to the depth."""

    def count_refill(self, tokens: int) -> None:
        """N-grams were asked to go on behind an epoch's proposal, and added so many tokens."""
        self.refill_attempts += 1
        self.refill_successes += tokens > 0
        self.refill_misses += tokens == 0
        self.refill_tokens += tokens

    @property
    def average_in_flight(self) -> float:
        """Windows in flight over the time that was observed; 0 without any."""
        total = sum(self.occupancy_s)
        return sum(k * t for k, t in enumerate(self.occupancy_s)) / total if total > 0 else 0.0

    @property
    def parallel_s(self) -> float:
        """Time with two or more in flight."""
        return sum(self.occupancy_s[2:])

    @property
    def full_s(self) -> float:
        """Time with as many in flight as the depth allows."""
        return self.occupancy_s[-1]


class VerifyWindows:
    """Opens windows with ids 1, 2, 3, ... and completes them strictly in that order; at most ``depth`` at a time.

    Windows of a depth's worth count until they come back, those that were given up included.
    """

    def __init__(self, depth: int, now: float) -> None:
        self.depth = depth
        self.stats = WindowStats(occupancy_s=[0.0] * (depth + 1))
        self._in_flight: deque[int] = deque()
        self._since = now

    @property
    def in_flight(self) -> int:
        """Windows that are out."""
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        """Whether no more may be opened."""
        return len(self._in_flight) >= self.depth

    def supports_pipelining(self, width: int) -> bool:
        """Whether windows of this width could be in flight together."""
        return self.depth > 1 and width > 0

    def open(self, now: float) -> int:
        """The id of a new window; raises WindowError beyond the depth."""
        if self.full:
            raise WindowError(f"{self.in_flight} windows are in flight, the depth is {self.depth}")
        self._spend(now)
        self.stats.opened += 1
        self._in_flight.append(self.stats.opened)
        self.stats.max_in_flight = max(self.stats.max_in_flight, self.in_flight)
        return self.stats.opened

    def complete_next(self, window: int, now: float) -> None:
        """The oldest window has come back; raises WindowError if ``window`` is another one."""
        if not self._in_flight or self._in_flight[0] != window:
            expected = self._in_flight[0] if self._in_flight else "none"
            raise WindowError(f"window {window} came back out of order, expected {expected}")
        self._spend(now)
        self._in_flight.popleft()

    def _spend(self, now: float) -> None:
        self.stats.occupancy_s[self.in_flight] += max(0.0, now - self._since)
        self._since = now
