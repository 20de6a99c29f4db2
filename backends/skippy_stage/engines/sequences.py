"""Open sequences of an engine: their block tables, and those tables as one array for kernels.

When a batch needs more blocks than are free, the prefix store gives up blocks, just as many as are missing.
Only when it has none to give does the batch fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from skippy_stage.engines.base import KvUsage, SequenceRows
from skippy_stage.errors import SkippyError
from skippy_stage.kv_cache import BlockCopy, BlockPool, BlockTable


@dataclass(slots=True)
class _Open:
    table: BlockTable
    max_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Where the rows of a batch go; one entry per row, in batch order."""

    sequences: Sequence[SequenceRows]
    starts: list[int]
    """First row of each sequence in the batch."""
    positions: npt.NDArray[np.int64]
    """Position of each row in its sequence."""
    blocks: npt.NDArray[np.int64]
    """KV block that each row is written to."""
    offsets: npt.NDArray[np.int64]
    """Place within that block."""
    slots: npt.NDArray[np.int64]
    """Line of ``tables`` that holds the row's sequence."""
    tables: npt.NDArray[np.int32]
    """``[slots, blocks]``: KV blocks of each sequence, in order; garbage beyond its length."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Copies to do before the rows are written."""

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return len(self.positions)


class SequenceStore:
    """Sequences by id, all within one block pool; the PrefixBlocks of an engine. Errors name the sequence."""

    def __init__(self, kv_tokens: int, block_tokens: int) -> None:
        self.pool = BlockPool(max(1, kv_tokens // block_tokens), block_tokens)
        self._open: dict[int, _Open] = {}
        self._free_slots: list[int] = []
        self._tables: npt.NDArray[np.int32] = np.zeros((8, 64), np.int32)
        self._reclaim: Callable[[int], None] | None = None

    def open(self, sequence: int, max_tokens: int) -> None:
        """Open a sequence of at most ``max_tokens`` positions; takes no blocks yet."""
        if sequence in self._open:
            raise SkippyError(f"sequence {sequence} is open already")
        needed = self.pool.blocks_for(max_tokens)
        if max_tokens < 1 or needed > self.pool.total:
            raise SkippyError(
                f"sequence {sequence}: {max_tokens} tokens do not fit, the KV cache holds "
                f"{self.pool.total * self.pool.block_tokens}"
            )
        slot = self._free_slots.pop() if self._free_slots else len(self._open)
        self._grow(slot + 1, needed)
        self._open[sequence] = _Open(BlockTable(self.pool), max_tokens, slot)

    def close(self, sequence: int) -> None:
        """Free what the sequence holds; unknown ones are ignored."""
        state = self._open.pop(sequence, None)
        if state is not None:
            state.table.cut(0)
            self._free_slots.append(state.slot)

    def cached(self, sequence: int) -> int:
        """Positions cached."""
        return self._known(sequence).table.length

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` positions; a shorter sequence stays as it is."""
        table = self._known(sequence).table
        table.cut(min(length, table.length))

    def extend(self, sequences: Sequence[SequenceRows]) -> BatchRows:
        """Cut every sequence back to its ``past`` and give it room for its rows.

        Raises SkippyError before anything changes, unless blocks run out: then all are at ``past``, and the
        prefix store has given up what it could.
        """
        states = [self._check(item) for item in sequences]
        if len({item.sequence for item in sequences}) != len(sequences):
            raise SkippyError("a sequence is in the batch twice")
        for item, state in zip(sequences, states, strict=True):
            state.table.cut(item.past)
        self._make_room(sequences, states)
        size = self.pool.block_tokens
        copies: list[BlockCopy] = []
        for item, state in zip(sequences, states, strict=True):
            table = state.table
            copies += table.append(item.rows)
            # Blocks before the first written one cannot have changed since the line was last written,
            # but the line may belong to an earlier sequence of the slot or hold what was cut since.
            first = item.past // size
            self._tables[state.slot, first : len(table.blocks)] = table.blocks[first:]
        return self._located(sequences, states, copies)

    def locate(self, sequences: Sequence[SequenceRows]) -> BatchRows:
        """Where rows lie that are cached already; raises SkippyError for others."""
        states = [self._known(item.sequence) for item in sequences]
        for item, state in zip(sequences, states, strict=True):
            if not 0 <= item.past <= item.past + item.rows <= state.table.length:
                raise SkippyError(
                    f"sequence {item.sequence}: rows {item.past} to {item.past + item.rows}, has "
                    f"{state.table.length}"
                )
        return self._located(sequences, states, [])

    def room(self, sequence: int) -> int:
        """Positions that the sequence may still grow by."""
        state = self._known(sequence)
        return state.max_tokens - state.table.length

    def _located(
        self, sequences: Sequence[SequenceRows], states: Sequence[_Open], copies: list[BlockCopy]
    ) -> BatchRows:
        size = self.pool.block_tokens
        starts, start = [], 0
        total = sum(item.rows for item in sequences)
        positions, slots = np.empty(total, np.int64), np.empty(total, np.int64)
        for item, state in zip(sequences, states, strict=True):
            positions[start : start + item.rows] = np.arange(item.past, item.past + item.rows)
            slots[start : start + item.rows] = state.slot
            starts.append(start)
            start += item.rows
        blocks = self._tables[slots, positions // size].astype(np.int64)
        return BatchRows(sequences, starts, positions, blocks, positions % size, slots, self._tables, copies)

    def blocks(self, sequence: int) -> list[int]:
        """The sequence's blocks in order."""
        return self._known(sequence).table.blocks

    @property
    def block_tokens(self) -> int:
        """See PrefixBlocks; these and what follows are for the prefix store."""
        return self.pool.block_tokens

    @property
    def blocks_free(self) -> int:
        """See PrefixBlocks."""
        return self.pool.free

    @property
    def blocks_held(self) -> int:
        """See PrefixBlocks."""
        return self.pool.recorded

    @property
    def blocks_exclusive(self) -> int:
        """See PrefixBlocks."""
        return self.pool.recorded_alone

    def hold(self, sequence: int, first: int, count: int) -> list[int]:
        """See PrefixBlocks."""
        blocks = self._known(sequence).table.blocks
        if not 0 <= first <= first + count <= len(blocks):
            raise SkippyError(
                f"sequence {sequence}: blocks {first} to {first + count} of {len(blocks)} cannot be recorded"
            )
        held = blocks[first : first + count]
        if any(map(self.pool.is_recorded, held)):
            raise SkippyError(f"sequence {sequence}: a block is recorded already, under another prefix")
        for block in held:
            self.pool.record(block)
        return held

    def adopt(self, sequence: int, blocks: Sequence[int], length: int) -> None:
        """See PrefixBlocks."""
        state = self._known(sequence)
        if state.table.length:
            raise SkippyError(
                f"sequence {sequence} has {state.table.length} positions, it cannot be restored"
            )
        if length > state.max_tokens:
            raise SkippyError(
                f"sequence {sequence}: {length} positions restored, opened for {state.max_tokens}"
            )
        state.table.adopt(blocks, length)
        self._tables[state.slot, : len(blocks)] = blocks

    def drop(self, block: int) -> bool:
        """See PrefixBlocks."""
        return self.pool.forget(block)

    def holds(self, block: int) -> bool:
        """See PrefixBlocks."""
        return self.pool.is_recorded(block)

    def exclusive(self, block: int) -> bool:
        """See PrefixBlocks."""
        return self.pool.is_recorded_alone(block)

    def set_reclaim(self, reclaim: Callable[[int], None]) -> None:
        """See PrefixBlocks."""
        self._reclaim = reclaim

    def usage(self) -> KvUsage:
        """Blocks used and cached lengths."""
        lengths = {sequence: state.table.length for sequence, state in self._open.items()}
        alone = self.pool.recorded_alone
        return KvUsage(self.pool.total, self.pool.used - alone, lengths, alone)

    def check_integrity(self) -> None:
        """Raise AssertionError if tables, slots and pool disagree."""
        states = self._open.values()
        for state in states:
            state.table.check_integrity()
            line = self._tables[state.slot, : len(state.table.blocks)].tolist()
            if line != state.table.blocks:
                raise AssertionError(f"slot {state.slot} holds {line}, its table {state.table.blocks}")
        self.pool.check_integrity(state.table for state in states)
        slots = sorted([state.slot for state in states] + self._free_slots)
        if slots != list(range(len(slots))):
            raise AssertionError(f"slots in use or free: {slots}")

    def _known(self, sequence: int) -> _Open:
        state = self._open.get(sequence)
        if state is None:
            raise SkippyError(f"sequence {sequence} is not open")
        return state

    def _check(self, item: SequenceRows) -> _Open:
        state = self._known(item.sequence)
        if not 0 <= item.past <= state.table.length:
            raise SkippyError(
                f"sequence {item.sequence}: past {item.past} is beyond the {state.table.length} cached"
            )
        if item.rows < 1 or not 0 <= item.logits <= item.rows:
            raise SkippyError(f"sequence {item.sequence}: {item.rows} rows with {item.logits} logits")
        if item.past + item.rows > state.max_tokens:
            raise SkippyError(
                f"sequence {item.sequence}: {item.past + item.rows} positions, opened for {state.max_tokens}"
            )
        return state

    def _make_room(self, items: Sequence[SequenceRows], states: Sequence[_Open]) -> None:
        """See to it that a batch finds the blocks it will take; raises SkippyError when there are too few."""
        while True:
            missing, sequence = self._missing(items, states)
            if not missing:
                return
            held = self.pool.recorded
            if self._reclaim is not None:
                self._reclaim(missing)
            if self.pool.recorded == held:
                raise SkippyError(
                    f"sequence {sequence}: no KV block is free ({self.pool.total} in use or promised)"
                )

    def _missing(self, items: Sequence[SequenceRows], states: Sequence[_Open]) -> tuple[int, int]:
        """How many blocks a batch lacks, and the first sequence that would not get what it needs."""
        needed, first = 0, -1
        holders: dict[int, int] = {}
        for item, state in zip(items, states, strict=True):
            table = state.table
            needed += self.pool.blocks_for(table.length + item.rows) - len(table.blocks)
            block = table.open_block()
            if block is not None:
                # Who appends inside a shared block leaves it for a copy; the last holder needs none.
                left = holders.get(block, self.pool.holders(block))
                needed += left > 1
                holders[block] = left - 1
            if needed > self.pool.free and first < 0:
                first = item.sequence
        return max(0, needed - self.pool.free), first

    def _grow(self, slots: int, blocks: int) -> None:
        lines, width = self._tables.shape
        if slots > lines or blocks > width:
            grown = np.zeros((max(lines, 2 * slots), max(width, blocks)), np.int32)
            grown[:lines, :width] = self._tables
            self._tables = grown
