"""The prefill machine: a prompt becomes chunks, several of them in flight (spec 3.1, 3.3).

Chunks are planned over the first ``P = n_prompt - 1`` tokens, as in the spec; the chunk that reaches P
carries the last prompt token too and is sampled, which saves the extra trip of a separate first decode.

A credit bounds the chunks of one prompt between stage 0 and the start of the second stage. It returns
when a chunk leaves stage 0 (with one stage: when the chunk is done). Limit 0 is lock-step: a chunk waits
until the one before has left the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Chunk(NamedTuple):
    """Prompt positions ``[start, end)``; ``sample`` on the one that ends the prompt."""

    start: int
    end: int
    sample: bool

    @property
    def rows(self) -> int:
        """Rows that the chunk executes."""
        return self.end - self.start


class ChunkPolicy(Protocol):
    """How large a chunk should be."""

    def chunk_size(self, index: int, total: int) -> int:
        """Size of chunk ``index`` of a prefill of ``total`` tokens; at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class FixedChunks:
    """Every chunk has the same size (policy ``fixed`` of spec 3.2)."""

    size: int

    def chunk_size(self, index: int, total: int) -> int:
        """The fixed size."""
        return self.size


def chunk_end(position: int, size: int, total: int, boundary: int | None = None) -> int:
    """Where a chunk from ``position`` ends: ``size`` on, at ``total`` or at the boundary it would cross."""
    end = min(position + size, total)
    if boundary is not None and position < boundary:
        end = min(end, boundary)
    return end


class PrefillMachine:
    """The prompt of one session on its way through the stages."""

    def __init__(self, n_prompt: int, policy: ChunkPolicy, credits: int, start: int = 0) -> None:
        if not 0 <= start < n_prompt:
            raise ValueError(f"prefill of {n_prompt} tokens from position {start}")
        self._n_prompt = n_prompt
        self._policy = policy
        self._credits = credits
        self._position = start
        self._index = 0
        self._at_stage_0 = 0
        self._in_flight = 0

    @property
    def planned(self) -> bool:
        """True when every chunk was dispatched."""
        return self._position == self._n_prompt

    @property
    def done(self) -> bool:
        """True when every chunk has come back."""
        return self.planned and self._in_flight == 0

    def next_chunk(self, room: int) -> Chunk | None:
        """The next chunk with at most ``room`` rows; None when all are planned or credits are out."""
        if self.planned or room < 1:
            return None
        if self._in_flight if self._credits == 0 else self._at_stage_0 >= self._credits:
            return None
        total = self._n_prompt - 1
        size = min(self._policy.chunk_size(self._index, total), room)
        end = chunk_end(self._position, size, total)
        if end == total and end - self._position < room:
            return Chunk(self._position, self._n_prompt, sample=True)
        return Chunk(self._position, end, sample=False)

    def dispatched(self, chunk: Chunk) -> None:
        """A chunk that ``next_chunk`` gave is in a frame now."""
        if chunk.start != self._position:
            raise ValueError(f"chunk from {chunk.start}, expected {self._position}")
        self._position = chunk.end
        self._index += 1
        self._at_stage_0 += 1
        self._in_flight += 1

    def left_first_stage(self) -> None:
        """The oldest chunk at stage 0 has left it: its credit returns."""
        self._at_stage_0 -= 1

    def completed(self) -> None:
        """The oldest chunk in flight has left the pipeline."""
        self._in_flight -= 1

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts of chunks disagree."""
        assert 0 <= self._at_stage_0 <= self._in_flight, (
            f"{self._at_stage_0} chunks at stage 0 of {self._in_flight}"
        )
        assert self._credits == 0 or self._at_stage_0 <= self._credits, "more chunks at stage 0 than credits"
