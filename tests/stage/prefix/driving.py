"""A scripted engine with a prefix store, driven session by session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from skippy_stage.engines.base import Batch, SequenceRows
from skippy_stage.prefix.resident import ResidentPrefixes
from skippy_stage.prefix.tree import Node

from tests.scripted import ScriptedEngine


def forward(engine: ScriptedEngine, *pieces: tuple[int, int, Sequence[int]]) -> None:
    """Run a batch of (session, past, tokens)."""
    rows = [SequenceRows(session, past, len(tokens)) for session, past, tokens in pieces]
    engine.forward(Batch(rows, np.array([token for piece in pieces for token in piece[2]], np.int32)))


class Resident:
    """One stage with resident prefixes. Every step leaves all in order."""

    def __init__(self, blocks: int = 16, block_tokens: int = 4, max_tokens: int = 0) -> None:
        self.engine = ScriptedEngine(blocks=blocks, block_tokens=block_tokens)
        self.blocks = self.engine.prefix_blocks
        self.store = ResidentPrefixes(self.blocks, max_tokens=max_tokens)

    def run(self, session: int, tokens: Sequence[int], past: int | None = None) -> None:
        """Open the session if it is new, and let it go on with these tokens."""
        if session not in self.engine.usage().cached:
            self.engine.open(session, self.blocks.pool.total * self.blocks.block_tokens)
        forward(self.engine, (session, self.engine.cached(session) if past is None else past, tokens))
        self.check()

    def made(self, session: int, tokens: Sequence[int], namespace: str = "") -> int:
        """A session computes tokens, records them and ends; gives what was newly recorded."""
        self.run(session, tokens)
        recorded = self.store.record(session, namespace, tokens)
        self.close(session)
        return recorded

    def restored(self, session: int, tokens: Sequence[int], namespace: str = "") -> int:
        """A new session starts with all that can be restored of these tokens."""
        found = self.store.probe(session, namespace, tokens).longest
        self.engine.open(session, self.blocks.pool.total * self.blocks.block_tokens)
        assert self.store.restore(session, found) == tuple(tokens[:found])
        assert self.engine.columns(session) == self.engine.columns_of(tokens[:found])
        self.check()
        return found

    def close(self, session: int) -> None:
        self.engine.close(session)
        self.store.release(session)
        self.check()

    def longest(self, tokens: Sequence[int], namespace: str = "") -> int:
        """What could be restored, without leaving a lease."""
        found = self.store.probe(-1, namespace, tokens).longest
        self.store.release(-1)
        return found

    def paths(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        """Namespace and tokens of every recorded block's path."""
        return {node.block: _path(node) for node in self.nodes()}

    def nodes(self) -> Iterable[Node]:
        return self.store._tree.walk()

    def leased_blocks(self) -> set[int]:
        """Blocks on leased paths."""
        found: set[int] = set()
        for lease in self.store._leases.values():
            found |= {node.block for node in lease.path}
        return found

    def check(self) -> None:
        """All is accounted for, and every recorded block holds what its path makes it hold."""
        self.store.check_integrity()
        self.engine.check_integrity()
        for block, (_, tokens) in self.paths().items():
            columns = self.engine.columns_of(tokens)
            start = (len(tokens) - 1) // self.blocks.block_tokens * self.blocks.block_tokens
            assert self.engine.memory(block)[: len(tokens) - start] == columns[start:]

    def check_empty(self) -> None:
        """No session and no lease is left; all that is held can be had back."""
        self.check()
        assert self.engine.usage().blocks_used == 0
        assert self.store.status().leases == 0
        total = self.blocks.pool.total
        assert self.blocks.blocks_free + self.blocks.blocks_exclusive == total
        self.store.reclaim(total)
        assert self.blocks.blocks_free == total
        assert self.store.status().entries == 0
        self.check()


def _path(node: Node) -> tuple[str, tuple[int, ...]]:
    tokens: tuple[int, ...] = ()
    while node.parent is not None:
        tokens = node.tokens + tokens
        node = node.parent
    return node.namespace, tokens  # type: ignore[attr-defined]
