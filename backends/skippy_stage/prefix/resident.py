"""Resident prefixes: recorded KV blocks stay where they are and are shared (spec 4.1, ``resident-kv``).

Any common prefix of a recorded path can be restored, without a copy: the session starts with the same blocks,
and gets a copy of the last one when it writes into it.

Invariants:

* The tree's nodes are exactly the blocks that this store holds; what is in them does not change.
* A lease pins the node where its match ends, and with it the path above: pinned nodes and those above them
  are never evicted. After a restore it pins the last full block that the session shares.
* Every other block can be had back: blocks that are not free are at most those of live sessions and of leased
  paths. Blocks go one leaf at a time, and only as many as are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from skippy_stage.engines.base import PrefixBlocks
from skippy_stage.errors import SkippyError
from skippy_stage.prefix.eviction import EvictionQueue
from skippy_stage.prefix.store import check_lease, check_record
from skippy_stage.prefix.tree import Match, Node, PrefixTree, Tokens
from skippy_stage.protocol import PrefixStatus, Restorable


@dataclass(frozen=True, slots=True)
class _Lease:
    """Nothing leased has neither tokens nor path, and is not kept."""

    tokens: Tokens
    path: tuple[Node, ...]


class ResidentPrefixes:
    """PrefixStore over shared KV blocks. ``max_tokens`` bounds the tokens recorded; 0 is no bound."""

    def __init__(self, blocks: PrefixBlocks, *, max_tokens: int = 0) -> None:
        self._blocks = blocks
        self._max_tokens = max_tokens
        self._tree = PrefixTree(blocks.block_tokens)
        self._queue = EvictionQueue()
        self._nodes: dict[int, Node] = {}
        """By block."""
        self._leases: dict[int, _Lease] = {}
        self._lookups = self._hits = self._restored = self._recorded = self._evicted = self._dropped = 0
        blocks.set_reclaim(self.reclaim)

    def probe(self, session: int, namespace: str, tokens: Sequence[int]) -> Restorable:
        """See PrefixStore."""
        wanted = tuple(tokens)
        match = self._use(namespace, wanted)
        self._lookups += 1
        self._hits += match.length > 0
        self._lease(session, _Lease(wanted[: match.length], match.path))
        return Restorable(match.length)

    def leased(self, session: int) -> tuple[int, ...]:
        """See PrefixStore."""
        lease = self._leases.get(session)
        return lease.tokens if lease else ()

    def restore(self, session: int, length: int) -> tuple[int, ...]:
        """See PrefixStore."""
        lease = self._leases.get(session, _Lease((), ()))
        check_lease(session, length, len(lease.tokens))
        size = self._tree.block_tokens
        if length:
            path = lease.path[: -(-length // size)]
            self._blocks.adopt(session, [node.block for node in path], length)
            self._restored += length
        full = length // size
        self._lease(session, _Lease(lease.tokens[: full * size], lease.path[:full]))
        return lease.tokens[:length]

    def record(self, session: int, namespace: str, tokens: Sequence[int]) -> int:
        """See PrefixStore."""
        path = tuple(tokens)
        check_record(session, len(path), self._blocks.cached(session))
        match = self._use(namespace, path)
        if match.length == len(path):
            return 0
        recorded = self._grow(session, match, path)
        self._recorded += recorded
        self._dropped += match.length + recorded < len(path)
        return recorded

    def release(self, session: int) -> None:
        """See PrefixStore."""
        self._lease(session, _Lease((), ()))

    def release_all(self) -> None:
        """See PrefixStore."""
        for session in list(self._leases):
            self.release(session)

    def reclaim(self, wanted: int) -> None:
        """Give up blocks until ``wanted`` are free that were not, leaves that no sequence holds first.

        If there are only others, one of those goes. That frees nothing by itself, but perhaps the blocks above
        it are nobody else's, or a sequence need not copy it now. Called again as long as something went.
        """
        shared: list[Node] = []
        freed = 0
        while freed < wanted and (leaf := self._queue.pop()) is not None:
            if self._blocks.exclusive(leaf.block):
                self._evict(leaf)
                freed += 1
            else:
                shared.append(leaf)
        if shared and not freed:
            self._evict(shared.pop(0))
        for leaf in shared:
            self._queue.offer(leaf)

    def status(self) -> PrefixStatus:
        """See PrefixStore."""
        return PrefixStatus(
            payload="resident-kv",
            entries=self._tree.nodes,
            blocks=self._blocks.blocks_exclusive,
            tokens=self._tree.tokens,
            leases=len(self._leases),
            lookups=self._lookups,
            hits=self._hits,
            restored_tokens=self._restored,
            recorded_tokens=self._recorded,
            evicted=self._evicted,
            dropped=self._dropped,
        )

    def check_integrity(self) -> None:
        """See PrefixStore."""
        self._tree.check_integrity()
        self._queue.check_integrity()
        nodes = list(self._tree.walk())
        if len(nodes) != len(self._nodes) or len(nodes) != self._blocks.blocks_held:
            raise AssertionError(f"{len(nodes)} nodes, {self._blocks.blocks_held} blocks held")
        for node in nodes:
            if self._nodes.get(node.block) is not node or not self._blocks.holds(node.block):
                raise AssertionError(f"block {node.block} is not held, or not for one node")
        ends = Counter(id(lease.path[-1]) for lease in self._leases.values())
        for node in nodes:
            if node.pins != ends[id(node)]:
                raise AssertionError(f"block {node.block} has {node.pins} pins")
            if bool(node.stamp) != (not node.pins and not node.children):
                raise AssertionError(f"block {node.block} is on offer although it is needed, or is not")
        if sum(node.pins for node in nodes) != len(self._leases):
            raise AssertionError("a lease is on a node that is gone")

    def _use(self, namespace: str, tokens: Tokens) -> Match:
        """Match tokens, and note that the path was used."""
        match = self._tree.match(namespace, tokens)
        for node in match.path:
            self._queue.touch(node)
        if match.path:
            self._offer(match.path[-1])
        return match

    def _lease(self, session: int, lease: _Lease) -> None:
        """Put a lease in the place of the session's earlier one."""
        earlier = self._leases.pop(session, None)
        if lease.path:
            self._leases[session] = lease
            self._pin(lease.path[-1])
        if earlier is not None:
            self._unpin(earlier.path[-1])

    def _pin(self, node: Node) -> None:
        node.pins += 1
        self._queue.withdraw(node)

    def _unpin(self, node: Node) -> None:
        node.pins -= 1
        self._offer(node)

    def _offer(self, node: Node) -> None:
        """Let a node be evicted if it is a leaf that nothing pins."""
        if node.parent is not None and not node.children and not node.pins:
            self._queue.offer(node)

    def _grow(self, session: int, match: Match, path: Tokens) -> int:
        """Hold the session's blocks from the end of the match on, as far as the bound allows."""
        node, size = match.parent, self._tree.block_tokens
        start = node.end
        own = self._blocks.blocks(session)[start // size]
        outgrown = _outgrown(match)
        end = start + self._room(match, len(path) - start, outgrown)
        if end <= match.length:
            return 0
        pieces = [path[at : min(at + size, end)] for at in range(start, end, size)]
        known = self._nodes.get(own)
        if known is not None and (known.parent is not node or pieces[0][: len(known.tokens)] != known.tokens):
            raise SkippyError(f"session {session}: block {own} is recorded already, under another prefix")
        done = known is not None
        blocks = self._blocks.hold(session, start // size + done, len(pieces) - done)
        if outgrown is not None and outgrown is not known:
            self._remove(outgrown)
        if known is not None:
            # The session had filled more of this block when its beginning was recorded.
            self._tree.widen(known, pieces[0])
            self._queue.touch(known)
            node = known
        for piece, block in zip(pieces[done:], blocks, strict=True):
            self._queue.withdraw(node)
            node = self._nodes[block] = self._tree.add(node, piece, block)
            self._queue.touch(node)
        self._offer(node)
        return end - match.length

    def _room(self, match: Match, wanted: int, outgrown: Node | None) -> int:
        """How many of ``wanted`` tokens may be added after the full blocks of a match; evicts for them."""
        if not self._max_tokens:
            return wanted
        most = self._max_tokens + (len(outgrown.tokens) if outgrown else 0)
        kept = match.path[-1] if match.path else match.parent
        self._pin(kept)
        while self._tree.tokens + wanted > most and (leaf := self._queue.pop()) is not None:
            self._evict(leaf)
        self._unpin(kept)
        return max(0, min(wanted, most - self._tree.tokens))

    def _evict(self, leaf: Node) -> None:
        self._queue.evicted(leaf)
        self._evicted += 1
        self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        self._queue.withdraw(leaf)
        parent = self._tree.remove(leaf)
        del self._nodes[leaf.block]
        self._blocks.drop(leaf.block)
        self._offer(parent)


def _outgrown(match: Match) -> Node | None:
    """The node that is of no use once the path is there: its tokens are all the path's, and no lease ends in it."""
    last = match.path[-1] if match.path else match.parent
    if last is match.parent or last.end > match.length or last.pins:
        return None
    return last
