"""Paged KV accounting: which block of the cache holds which positions of which sequence.

Pure bookkeeping, without tensors. A sequence's positions lie in fixed-size blocks named by its
``BlockTable``; tables may share blocks. A block held by more than one table is immutable: whoever writes
into it gets a copy first, and ``append`` returns the copies that the engine must do before it writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    """All blocks of one cache: a free list and a count of holders per block."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.total = blocks
        self._holders = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds; a shared one counts once."""
        return self.total - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` positions take."""
        return -(-tokens // self.block_tokens)

    def holders(self, block: int) -> int:
        """How many tables hold a block."""
        return self._holders[block]

    def take(self) -> int:
        """Take a free block; raises OutOfBlocksError."""
        if not self._free:
            raise OutOfBlocksError(f"all {self.total} KV blocks are in use")
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a holder to a block in use."""
        if self._holders[block] < 1:
            raise AssertionError(f"block {block} is shared, but nobody holds it")
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Drop a holder; the last one frees the block."""
        if self._holders[block] < 1:
            raise AssertionError(f"block {block} is released, but nobody holds it")
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free.append(block)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError unless ``tables`` are exactly the holders that the pool counts."""
        held = Counter(block for table in tables for block in table.blocks)
        for block in range(self.total):
            if held[block] != self._holders[block]:
                raise AssertionError(f"block {block}: {held[block]} holders, {self._holders[block]} counted")
        free = set(self._free)
        if len(free) != len(self._free) or any(self._holders[block] for block in free):
            raise AssertionError("a block is free twice, or free and held")
        if len(free) + sum(1 for count in self._holders if count) != self.total:
            raise AssertionError("a block is neither free nor held")


class BlockTable:
    """The blocks of one sequence or record, in order of its positions."""

    __slots__ = ("_pool", "blocks", "length")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.length = 0

    def blocks_to_append(self, tokens: int) -> int:
        """Free blocks that ``append(tokens)`` will take, its copy included."""
        new = self._pool.blocks_for(self.length + tokens) - len(self.blocks)
        return new + (1 if tokens and self._ends_in_shared() else 0)

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

    def share(self, length: int) -> BlockTable:
        """Make a table of the first ``length`` positions that holds the same blocks."""
        if not 0 <= length <= self.length:
            raise AssertionError(f"share {length} of {self.length} positions")
        other = BlockTable(self._pool)
        other.blocks = self.blocks[: self._pool.blocks_for(length)]
        other.length = length
        for block in other.blocks:
            self._pool.retain(block)
        return other

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
        return self.length % self._pool.block_tokens != 0 and self._pool.holders(self.blocks[-1]) > 1
