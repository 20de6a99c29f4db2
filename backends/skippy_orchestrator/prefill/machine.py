"""The prefill machine: a prompt becomes chunks, several of them in flight (spec 3.1, 3.3, 3.4).

Chunks are planned over the first ``P = n_prompt - 1`` tokens, as in the spec; the chunk that reaches P
carries the last prompt token too and is sampled, which saves the extra trip of a separate first decode.

A credit bounds the chunks of one prompt between stage 0 and the start of the second stage. A chunk takes
one when it is dispatched; the caller returns the oldest when the second stage starts on its chunk, or at
once when there is one stage. Limit 0 is lock-step: a chunk waits until the one before has left the
pipeline, and credits do not matter.

Events come in pipeline order: for each chunk ``dispatched``, then ``left_first_stage`` and
``credit_returned`` (in either order), then ``completed``; each event means the oldest chunk that has not
had it yet. Times (``now``) are seconds of one clock that never goes back. A cancelled prompt needs no
event: the machine is dropped as it is.

Invariants, after any prefix of events:

* the chunks dispatched cover ``[start, position)`` exactly and in order;
* none crosses a boundary, and no more of them hold a credit than the limit says (I13);
* asking for the next chunk changes nothing, but that a wait begins when it is a credit that is missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skippy_orchestrator.prefill.observations import (
    ComputeSample,
    PrefillReport,
    PrefillStats,
    representative,
)
from skippy_orchestrator.prefill.planner import Planner
from skippy_orchestrator.prefill.transport import TransportPool


class Chunk(NamedTuple):
    """Prompt positions ``[start, end)``; ``sample`` on the one that ends the prompt."""

    start: int
    end: int
    sample: bool

    @property
    def rows(self) -> int:
        """Rows that the chunk executes."""
        return self.end - self.start


def chunk_end(position: int, size: int, total: int, boundary: int | None = None) -> int:
    """Where a chunk from ``position`` ends: ``size`` on, at ``total`` or at the boundary it would cross."""
    end = min(position + size, total)
    if boundary is not None and position < boundary:
        end = min(end, boundary)
    return end


@dataclass(slots=True)
class PrefillSummary:
    """What one prefill did (the sums of spec 9.3, ``stage.openai_prefill``). Times are milliseconds."""

    chunks: int = 0
    """Chunks dispatched."""
    min_chunk_rows: int = 0
    """Rows of the smallest of them; 0 before the first."""
    max_chunk_rows: int = 0
    """Rows of the largest of them."""
    compute_ms: float = 0.0
    """Compute time of stage 0, all chunks."""
    write_ms: float = 0.0
    """Write time of stage 0, all chunks."""
    write_ms_max: float = 0.0
    """Longest write of a chunk."""
    credit_waits: int = 0
    """Chunks that had to wait for a credit, or in lock-step for the chunk before."""
    credit_wait_ms: float = 0.0
    """Their waits together; one that still waits is not in it."""
    credit_wait_ms_max: float = 0.0
    """The longest of these waits."""
    pending_max: int = 0
    """Most credits that were out at a time; 0 in lock-step."""
    drains: int = 0
    """Credits that were out when the last chunk had been dispatched, its own included."""
    drain_wait_ms: float = 0.0
    """Time from that dispatch to the return of the last credit."""
    drain_wait_ms_max: float = 0.0
    """Longest time between two returns of it."""


class _AtStage0(NamedTuple):
    """A chunk on its way to or through stage 0."""

    rows: int
    prefills: bool
    """False for a chunk of the last prompt token alone, which is a first decode."""
    wait_ms: float


class PrefillMachine:
    """The prompt of one session on its way through the stages."""

    def __init__(
        self, n_prompt: int, planner: Planner, credits: int, start: int = 0, boundaries: Sequence[int] = ()
    ) -> None:
        """Plan the prompt from ``start`` (tokens restored) on, with a credit limit.

        ``boundaries`` are positions at which a chunk must end so that exact state can be recorded there;
        ``n_prompt - 1`` among them leaves the last prompt token a chunk of its own. Those outside
        ``(start, n_prompt)`` have no effect.
        """
        if not 0 <= start < n_prompt:
            raise ValueError(f"prefill of {n_prompt} tokens from position {start}")
        if credits < 0:
            raise ValueError(f"credits: got {credits}, expected at least 0")
        self.stats = PrefillSummary()
        self.replies = PrefillStats()
        self._n_prompt = n_prompt
        self._total = n_prompt - 1
        self._planner = planner
        self._limit = credits
        self._boundaries = sorted(boundaries)
        self._last_alone = self._total in boundaries
        self._start = start
        self._position = start
        self._at_stage_0: deque[_AtStage0] = deque()
        self._credits_out = 0
        self._in_flight = 0
        self._waiting_since: float | None = None
        self._waited_ms = 0.0
        self._draining_since = 0.0
        self._sample = ComputeSample()

    @property
    def planned(self) -> bool:
        """True when every chunk was dispatched."""
        return self._position == self._n_prompt

    @property
    def done(self) -> bool:
        """True when every chunk has come back."""
        return self.planned and self._in_flight == 0

    @property
    def pending(self) -> int:
        """Credits that are out."""
        return self._credits_out

    @property
    def _blocked(self) -> bool:
        return self._in_flight > 0 if self._limit == 0 else self._credits_out >= self._limit

    def next_chunk(self, room: int, now: float) -> Chunk | None:
        """The next chunk with at most ``room`` rows; None when all are planned or credits are out.

        When a credit is all that is missing the chunk's wait begins, once; nothing else changes.
        """
        if self.planned or room < 1:
            return None
        if self._blocked:
            if self._waiting_since is None:
                self._waiting_since = now
                self.stats.credit_waits += 1
            return None
        size = min(self._planner.chunk_size(self.stats.chunks, self._total), room)
        end = chunk_end(self._position, size, self._total, self._next_boundary())
        joins = end == self._position or not self._last_alone
        if end == self._total and end - self._position < room and joins:
            return Chunk(self._position, self._n_prompt, sample=True)
        return Chunk(self._position, end, sample=False)

    def _next_boundary(self) -> int | None:
        index = bisect_right(self._boundaries, self._position)
        return self._boundaries[index] if index < len(self._boundaries) else None

    def dispatched(self, chunk: Chunk, now: float) -> None:
        """A chunk that ``next_chunk`` gave is in a frame now: it takes a credit."""
        if chunk.start != self._position:
            raise ValueError(f"chunk from {chunk.start}, expected {self._position}")
        if not chunk.start < chunk.end <= self._n_prompt:
            raise ValueError(f"chunk to {chunk.end}, expected {chunk.start + 1} to {self._n_prompt}")
        if self._blocked:
            raise ValueError(f"chunk from {chunk.start} without a credit")
        self._end_wait(now)
        wait_ms, self._waited_ms = self._waited_ms, 0.0
        self._at_stage_0.append(_AtStage0(chunk.rows, chunk.start < self._total, wait_ms))
        self._in_flight += 1
        self._position = chunk.end
        stats = self.stats
        stats.chunks += 1
        stats.min_chunk_rows = min(stats.min_chunk_rows or chunk.rows, chunk.rows)
        stats.max_chunk_rows = max(stats.max_chunk_rows, chunk.rows)
        stats.credit_wait_ms += wait_ms
        stats.credit_wait_ms_max = max(stats.credit_wait_ms_max, wait_ms)
        if self._limit == 0:
            return
        self._credits_out += 1
        stats.pending_max = max(stats.pending_max, self._credits_out)
        if self.planned:
            stats.drains = self._credits_out
            self._draining_since = now

    def credit_returned(self, now: float) -> None:
        """The second stage starts on the oldest chunk that holds a credit. No effect in lock-step."""
        if self._limit == 0:
            return
        if self._credits_out == 0:
            raise ValueError("a credit returned that no chunk held")
        self._credits_out -= 1
        self._end_wait(now)
        if self.planned:
            wait_ms = (now - self._draining_since) * 1000
            self._draining_since = now
            self.stats.drain_wait_ms += wait_ms
            self.stats.drain_wait_ms_max = max(self.stats.drain_wait_ms_max, wait_ms)

    def _end_wait(self, now: float) -> None:
        """What a chunk waits for from here on is room in a frame, which says nothing of the stages."""
        if self._waiting_since is not None:
            self._waited_ms = (now - self._waiting_since) * 1000
            self._waiting_since = None

    def left_first_stage(self, rows: int, compute_ms: float, write_ms: float) -> None:
        """The oldest chunk at stage 0, of this many rows, has left it after these times (spec 3.1)."""
        expected = self._at_stage_0[0].rows if self._at_stage_0 else 0
        if rows != expected or not expected:
            raise ValueError(f"a chunk of {rows} rows left stage 0, expected {expected or 'none'}")
        chunk = self._at_stage_0.popleft()
        self.stats.compute_ms += compute_ms
        self.stats.write_ms += write_ms
        self.stats.write_ms_max = max(self.stats.write_ms_max, write_ms)
        if chunk.prefills:
            # Otherwise a prompt restored to its last token would pass off the overhead of one row as a rate.
            self._sample = representative(self._sample, ComputeSample(compute_ms, rows))
        self._planner.observe(compute_ms, write_ms, chunk.wait_ms)

    def observed_at_stage(
        self, stage: int, rows: int, compute_us: int, write_us: int, wait_us: int, activation_bytes: int
    ) -> None:
        """A stage after the first reports what one chunk took there, microseconds (spec 2.7)."""
        if stage < 1:
            raise ValueError(f"stage: got {stage}, expected at least 1")
        self.replies.observe_compute(stage, compute_us, rows)
        self.replies.observe_edge(stage, write_us, wait_us, activation_bytes)

    def completed(self) -> None:
        """The oldest chunk in flight has left the pipeline."""
        if self._in_flight <= max(len(self._at_stage_0), self._credits_out):
            raise ValueError(
                f"a chunk completed out of order: {self._in_flight} in flight, "
                f"{len(self._at_stage_0)} at stage 0, {self._credits_out} credits out"
            )
        self._in_flight -= 1

    def report(self) -> PrefillReport:
        """What this prefill tells ``TransportPool.observe``; complete when the machine is done (spec 3.5)."""
        stats = self.stats
        wait_ms_max = max(stats.credit_wait_ms_max, stats.drain_wait_ms_max)
        return PrefillReport(self._sample, stats.write_ms_max, wait_ms_max, self.replies)

    def finish(self, pool: TransportPool) -> PrefillSummary:
        """Tell the pool what this prefill, now done, has learned; returns ``stats``. To be called once."""
        pool.observe(self.report())
        return self.stats

    def check_integrity(self) -> None:
        """Raise AssertionError when positions, credits and counts of chunks disagree."""
        at_stage_0, out, stats = len(self._at_stage_0), self._credits_out, self.stats
        assert self._start <= self._position <= self._n_prompt, f"prefill at position {self._position}"
        assert (stats.chunks == 0) == (self._position == self._start), f"{stats.chunks} chunks dispatched"
        assert 0 <= at_stage_0 <= self._in_flight, f"{at_stage_0} chunks at stage 0 of {self._in_flight}"
        assert self._in_flight <= stats.chunks, f"{self._in_flight} chunks in flight of {stats.chunks}"
        assert self._limit or self._in_flight <= 1, f"{self._in_flight} chunks in flight in lock-step"
        assert 0 <= out <= min(self._limit, self._in_flight), (
            f"{out} credits out, limit {self._limit}, {self._in_flight} chunks in flight"
        )
        assert out <= stats.pending_max <= self._limit, f"{stats.pending_max} credits were out at a time"
        assert self._waiting_since is None or not self.planned, "waits for a credit with no chunk left"
