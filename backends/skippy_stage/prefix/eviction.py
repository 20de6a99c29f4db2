"""In which order recorded blocks are given up: GreedyDual over the leaves of the tree (spec 4.8).

A node's priority is what it costs to compute it again plus the inflation at its last use; the inflation is
the highest priority evicted so far. So what was not used for long goes first, and of what was used at the same time
the cheapest. Later blocks of a prompt are dearer, since their tokens attend to more.

The queue is a heap of offers. An offer that was withdrawn, or renewed with another priority, stays in the
heap until it comes up or the heap is tidied; a node's stamp tells its valid offer.
"""

from __future__ import annotations

import heapq
from typing import Final

from skippy_stage.prefix.tree import Node

_ATTENTION_POSITIONS: Final = 4096
"""Where a token's attention costs about as much as all else; the order only needs its magnitude."""


class EvictionQueue:
    """Leaves that may be evicted, the one that is cheapest to lose first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._inflation = 0.0
        self._stamps = 0
        self._valid = 0

    def __len__(self) -> int:
        return self._valid

    def touch(self, node: Node) -> None:
        """Note that a node was used; counts once it is offered again."""
        node.priority = self._inflation + len(node.tokens) * (1 + node.start / _ATTENTION_POSITIONS)

    def offer(self, node: Node) -> None:
        """Let a node be evicted, by its present priority."""
        self._valid += not node.stamp
        self._stamps += 1
        node.stamp = self._stamps
        heapq.heappush(self._heap, (node.priority, node.stamp, node))
        if len(self._heap) > 2 * self._valid + 64:
            self._heap = [entry for entry in self._heap if entry[2].stamp == entry[1]]
            heapq.heapify(self._heap)

    def withdraw(self, node: Node) -> None:
        """Let a node not be evicted; it need not be on offer."""
        self._valid -= bool(node.stamp)
        node.stamp = 0

    def pop(self) -> Node | None:
        """Take the next node off the queue; None when there is none."""
        while self._heap:
            _, stamp, node = heapq.heappop(self._heap)
            if node.stamp == stamp:
                self.withdraw(node)
                return node
        return None

    def evicted(self, node: Node) -> None:
        """Note that a node was given up."""
        self._inflation = max(self._inflation, node.priority)

    def check_integrity(self) -> None:
        """Raise AssertionError if offers are miscounted."""
        valid = sum(entry[2].stamp == entry[1] for entry in self._heap)
        if valid != self._valid:
            raise AssertionError(f"{valid} nodes on offer, {self._valid} counted")
