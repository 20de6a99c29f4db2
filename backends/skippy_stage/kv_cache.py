"""Paged KV accounting: which block of the cache holds which positions of which sequence.

Pure bookkeeping, without tensors. A sequence's positions lie in fixed-size blocks named by its
``BlockTable``; tables may share blocks, and the prefix store may *record* a block, which makes it one more
holder. A block with more than one holder is immutable: whoever writes into it gets a copy first, and
``append`` returns the copies that the engine must do before it writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skippy_stage.errors import SkippyError


class OutOfBlocksError(SkippyError):
    """The pool cannot give as many blocks as were asked for; nothing was changed."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first ``tokens`` positions of block ``source`` to block ``target``, in every layer."""

    source: int
    target: int
    tokens: int


class BlockPool:
    """All blocks of one cache: a free list, and for every block how many hold it.

    Holders are tables, each of which holds a block at most once, and the prefix store's record of it.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.total = blocks
        self._holders = [0] * blocks
        self._recorded = [False] * blocks
        self._recorded_count = self._recorded_alone = 0
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds; a shared one counts once."""
        return self.total - len(self._free)

    @property
    def recorded(self) -> int:
        """Blocks that the prefix store holds."""
        return self._recorded_count

    @property
    def recorded_alone(self) -> int:
        """Blocks that the prefix store holds, and no table."""
        return self._recorded_alone

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` positions take."""
        return -(-tokens // self.block_tokens)

    def holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    def is_recorded(self, block: int) -> bool:
        """The prefix store holds the block."""
        return self._recorded[block]

    def is_recorded_alone(self, block: int) -> bool:
        """The prefix store holds the block, and no table does."""
        return self._recorded[block] and self._holders[block] == 1

    def take(self) -> int:
        """Take a free block; raises OutOfBlocksError."""
        if not self._free:
            raise OutOfBlocksError(f"all {self.total} KV blocks are in use")
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a table to the holders of a block in use."""
        if self._holders[block] < 1:
            raise AssertionError(f"block {block} is shared, but nobody holds it")
        self._recorded_alone -= self.is_recorded_alone(block)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Drop a table from the holders of a block; the last holder frees it."""
        if self._holders[block] <= self._recorded[block]:
            raise AssertionError(f"block {block} is released, but no table holds it")
        self._holders[block] -= 1
        self._recorded_alone += self.is_recorded_alone(block)
        if self._holders[block] == 0:
            self._free.append(block)

    def record(self, block: int) -> None:
        """Make the prefix store a holder of a block in use that it does not hold yet."""
        if self._holders[block] < 1 or self._recorded[block]:
            raise AssertionError(f"block {block} is recorded, but it is free or recorded already")
        self._recorded[block] = True
        self._holders[block] += 1
        self._recorded_count += 1

    def forget(self, block: int) -> bool:
        """End the prefix store's hold on a block; True when that freed it."""
        if not self._recorded[block]:
            raise AssertionError(f"block {block} is forgotten, but it is not recorded")
        self._recorded_alone -= self.is_recorded_alone(block)
        self._recorded[block] = False
        self._holders[block] -= 1
        self._recorded_count -= 1
        if self._holders[block] == 0:
            self._free.append(block)
            return True
        return False

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError unless ``tables`` and the records are exactly the holders that are counted."""
        held = Counter(block for table in tables for block in table.blocks)
        for block, recorded in enumerate(self._recorded):
            expected = held[block] + recorded
            if expected != self._holders[block]:
                raise AssertionError(f"block {block}: {expected} holders, {self._holders[block]} counted")
        alone = sum(map(self.is_recorded_alone, range(self.total)))
        if (self._recorded_count, self._recorded_alone) != (sum(self._recorded), alone):
            raise AssertionError("recorded blocks are miscounted")
        free = set(self._free)
        if len(free) != len(self._free) or any(self._holders[block] for block in free):
            raise AssertionError("a block is free twice, or free and held")
        if len(free) + sum(1 for count in self._holders if count) != self.total:
            raise AssertionError("a block is neither free nor held")


class BlockTable:
    """The blocks of one sequence, in order of its positions."""

    __slots__ = ("_pool", "blocks", "length")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.length = 0

    def blocks_to_append(self, tokens: int) -> int:
        """Free blocks that ``append(tokens)`` will take, its copy included."""
        new = self._pool.blocks_for(self.length + tokens) - len(self.blocks)
        return new + (1 if tokens and self._ends_in_shared() else 0)

    def open_block(self) -> int | None:
        """The table's last block if the next position falls into it, else None."""
        return self.blocks[-1] if self.length % self._pool.block_tokens else None

    def append(self, tokens: int) -> list[BlockCopy]:
        """Grow by ``tokens`` positions, and return the copies to do before they are written.

        Raises OutOfBlocksError without changing anything.
        """
        needed = self.blocks_to_append(tokens)
        if needed > self._pool.free:
            raise OutOfBlocksError(
                f"{needed} KV blocks needed, {self._pool.free} of {self._pool.total} are free"
            )
        copies = []
        if tokens and self._ends_in_shared():
            source, target = self.blocks[-1], self._pool.take()
            copies.append(BlockCopy(source, target, self.length % self._pool.block_tokens))
            self._pool.release(source)
            self.blocks[-1] = target
        self.length += tokens
        while len(self.blocks) * self._pool.block_tokens < self.length:
            self.blocks.append(self._pool.take())
        return copies

    def cut(self, length: int) -> None:
        """Keep the first ``length`` positions.

        A shared block cut inside is left as it is: its other holders still need it, and the next
        ``append`` copies it.
        """
        if not 0 <= length <= self.length:
            raise AssertionError(f"cut to {length} of {self.length} positions")
        self.length = length
        keep = self._pool.blocks_for(length)
        while len(self.blocks) > keep:
            self._pool.release(self.blocks.pop())

    def adopt(self, blocks: Sequence[int], length: int) -> None:
        """Start with ``length`` positions that lie in ``blocks``, which others hold and go on holding."""
        if self.length or len(blocks) != self._pool.blocks_for(length):
            raise AssertionError(f"{length} positions in {len(blocks)} blocks for a table with {self.length}")
        for block in blocks:
            self._pool.retain(block)
        self.blocks = list(blocks)
        self.length = length

    def check_integrity(self) -> None:
        """Raise AssertionError unless the blocks are as many as the length takes, each once and held."""
        if len(self.blocks) != self._pool.blocks_for(self.length):
            raise AssertionError(f"{len(self.blocks)} blocks for {self.length} positions")
        if len(set(self.blocks)) != len(self.blocks):
            raise AssertionError("a table holds a block twice")
        if any(self._pool.holders(block) < 1 for block in self.blocks):
            raise AssertionError("a table holds a free block")

    def _ends_in_shared(self) -> bool:
        """The next position falls inside a block that others hold too."""
        block = self.open_block()
        return block is not None and self._pool.holders(block) > 1
