"""Recorded token paths as a radix tree whose edges are KV blocks.

A node is one block with the tokens in it. A full block may have children; one that is filled in part is a
leaf. Matching goes token by token all the same: after the full blocks that are equal it takes the child that
agrees longest.

Invariants:

* Siblings have different tokens: a path of full blocks is in the tree at most once.
* A namespace without records leaves nothing behind.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

Tokens = tuple[int, ...]


class Node:
    """A block on a path."""

    __slots__ = ("block", "children", "order", "parent", "pins", "priority", "stamp", "start", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, block: int, start: int) -> None:
        self.parent = parent
        """None for the root of a namespace, which has no block and no tokens."""
        self.tokens = tokens
        self.block = block
        self.start = start
        """Position of the first token."""
        self.children: dict[Tokens, Node] = {}
        self.order: list[Tokens] = []
        """The children's tokens, sorted: the child that agrees longest is next to where a piece would go."""
        self.pins = 0
        """Reasons to keep this node, and with it those above."""
        self.priority = 0.0
        self.stamp = 0
        """The valid offer to evict it (see eviction.py), 0 for none."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


class Root(Node):
    """What the paths of a namespace begin with."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, (), -1, 0)
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class Match:
    """The longest common prefix of given tokens with a recorded path."""

    path: tuple[Node, ...]
    """From below the root; all but the last agree in all their tokens."""
    length: int
    """Tokens that agree."""
    parent: Node
    """The node below which the tokens go on after the full blocks that agree."""


class PrefixTree:
    """Nodes by namespace and tokens. Matching takes time in proportion to the tokens given."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.nodes = 0
        self.tokens = 0
        """Tokens of all nodes."""
        self._roots: dict[str, Root] = {}

    def match(self, namespace: str, tokens: Tokens) -> Match:
        """Find the longest common prefix."""
        node: Node = self._roots.get(namespace) or Root(namespace)
        size = self.block_tokens
        path: list[Node] = []
        length = 0
        while (child := node.children.get(tokens[length : length + size])) is not None:
            path.append(child)
            if len(child.tokens) < size:
                return Match(tuple(path), child.end, node)
            node = child
            length += size
        child, common = _closest(node, tokens[length : length + size])
        if child is not None:
            path.append(child)
        return Match(tuple(path), length + common, node)

    def add(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """Add a child to a root or a full block; it has none with these tokens."""
        if not tokens or tokens in parent.children or parent.end % self.block_tokens:
            raise AssertionError(f"no place for {len(tokens)} tokens at {parent.end}")
        if isinstance(parent, Root):
            self._roots[parent.namespace] = parent
        node = Node(parent, tokens, block, parent.end)
        parent.children[tokens] = node
        insort(parent.order, tokens)
        self.nodes += 1
        self.tokens += len(tokens)
        return node

    def widen(self, node: Node, tokens: Tokens) -> None:
        """Put more tokens into a node that is filled in part; its parent has no child with these."""
        parent = node.parent
        if parent is None or tokens in parent.children or tokens[: len(node.tokens)] != node.tokens:
            raise AssertionError(f"block {node.block} cannot hold {len(tokens)} tokens")
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens)]
        parent.children[tokens] = node
        insort(parent.order, tokens)
        self.tokens += len(tokens) - len(node.tokens)
        node.tokens = tokens

    def remove(self, node: Node) -> Node:
        """Remove a leaf; returns its parent."""
        parent = node.parent
        if parent is None or node.children:
            raise AssertionError("only leaves can be removed")
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens)]
        self.nodes -= 1
        self.tokens -= len(node.tokens)
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.namespace]
        return parent

    def walk(self) -> Iterator[Node]:
        """All nodes, parents before their children."""
        waiting: list[Node] = [*self._roots.values()]
        while waiting:
            children = waiting.pop().children.values()
            yield from children
            waiting += children

    def check_integrity(self) -> None:
        """Raise AssertionError if nodes are misplaced or miscounted."""
        nodes = tokens = 0
        for node in self.walk():
            nodes += 1
            tokens += len(node.tokens)
            parent = node.parent
            if parent is None or parent.children.get(node.tokens) is not node or node.start != parent.end:
                raise AssertionError(f"the node of block {node.block} is misplaced")
            if node.order != sorted(node.children) or (node.children and node.end % self.block_tokens):
                raise AssertionError(f"the node of block {node.block} has misplaced children")
            if not 1 <= len(node.tokens) <= self.block_tokens:
                raise AssertionError(f"block {node.block} holds {len(node.tokens)} tokens")
        if (nodes, tokens) != (self.nodes, self.tokens):
            raise AssertionError(f"{nodes} nodes, {tokens} tokens; counted {self.nodes}, {self.tokens}")
        for namespace, root in self._roots.items():
            if root.order != sorted(root.children) or not root.children:
                raise AssertionError(f"namespace {namespace!r} is empty or out of order")


def _closest(node: Node, piece: Tokens) -> tuple[Node | None, int]:
    """The child that has the longest common prefix with ``piece``, and its length; None for length 0."""
    at = bisect_left(node.order, piece)
    best, longest = None, 0
    for tokens in node.order[max(0, at - 1) : at + 1]:
        common = 0
        for ours, theirs in zip(tokens, piece, strict=False):
            if ours != theirs:
                break
            common += 1
        if common > longest:
            best, longest = node.children[tokens], common
    return best, longest
