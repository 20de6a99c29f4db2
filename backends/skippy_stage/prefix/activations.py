"""What stage 0 made of first chunks: their output rows, so that a repeated one need not be computed (spec 4.9).

Rows of a chunk that starts at position 0 depend on its tokens only. They are of use when the chunk's KV can
be restored too: then the stage sends the rows on without computing anything.

Invariants:

* Rows are copies that nobody can write to.
* At most ``max_bytes`` of rows are kept; the least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from skippy_stage.engines.base import Hidden


class ActivationOutcome(StrEnum):
    """What became of a first chunk, by the labels of spec 4.9."""

    MISS = "stage0_activation_miss"
    """Its rows are not there."""
    KV_MISS = "stage0_activation_hit_kv_miss"
    """Its rows are there, nothing of its KV is."""
    PREFIX_SHORT = "stage0_activation_hit_prefix_short"
    """Its rows are there, only the beginning of its KV is."""
    RESIDENT_HIT = "stage0_activation_resident_hit"
    """Both are there: it was not computed."""


@dataclass(frozen=True, slots=True)
class ActivationStatus:
    """What an ActivationCache holds, and totals since the stage started."""

    entries: int
    bytes: int
    outcomes: dict[ActivationOutcome, int]
    evicted: int
    dropped: int
    """Chunks that alone are larger than the cache."""

    @property
    def hits(self) -> int:
        """Chunks that were not computed."""
        return self.outcomes[ActivationOutcome.RESIDENT_HIT]

    @property
    def misses(self) -> int:
        """Chunks that were looked up and computed all the same."""
        return sum(self.outcomes.values()) - self.hits


class ActivationCache:
    """Output rows of first chunks by namespace and tokens. A budget of 0 bytes keeps none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._rows: OrderedDict[tuple[str, tuple[int, ...]], Hidden] = OrderedDict()
        self._outcomes = dict.fromkeys(ActivationOutcome, 0)
        self._evicted = self._dropped = 0

    def find(self, namespace: str, tokens: Sequence[int]) -> Hidden | None:
        """The output rows ``[tokens, hidden_size]`` of exactly this chunk, read-only; None is counted a miss."""
        if not self._max_bytes:
            return None
        key = (namespace, tuple(tokens))
        rows = self._rows.get(key)
        if rows is None:
            self._outcomes[ActivationOutcome.MISS] += 1
            return None
        self._rows.move_to_end(key)
        return rows

    def restored(self, length: int, tokens: int) -> ActivationOutcome:
        """Count what became of a chunk of ``tokens`` whose rows were found: ``length`` have their KV."""
        outcome = ActivationOutcome.PREFIX_SHORT
        if length >= tokens:
            outcome = ActivationOutcome.RESIDENT_HIT
        elif length <= 0:
            outcome = ActivationOutcome.KV_MISS
        self._outcomes[outcome] += 1
        return outcome

    def record(self, namespace: str, tokens: Sequence[int], rows: Hidden) -> bool:
        """Keep a copy of a chunk's output rows ``[tokens, hidden_size]``; False when that is not new, or too much."""
        if not self._max_bytes:
            return False
        key = (namespace, tuple(tokens))
        if key in self._rows:
            self._rows.move_to_end(key)
            return False
        if rows.nbytes > self._max_bytes:
            self._dropped += 1
            return False
        while self._bytes + rows.nbytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= oldest.nbytes
            self._evicted += 1
        kept = rows.copy()
        kept.setflags(write=False)
        self._rows[key] = kept
        self._bytes += kept.nbytes
        return True

    def status(self) -> ActivationStatus:
        """What is held, and totals."""
        return ActivationStatus(
            len(self._rows), self._bytes, dict(self._outcomes), self._evicted, self._dropped
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the bytes counted are not those held, or above the budget."""
        held = sum(rows.nbytes for rows in self._rows.values())
        if held != self._bytes or held > self._max_bytes:
            raise AssertionError(f"{held} bytes of rows, {self._bytes} counted, at most {self._max_bytes}")
