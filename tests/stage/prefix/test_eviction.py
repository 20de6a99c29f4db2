"""The order in which leaves are given up."""

from __future__ import annotations

from skippy_stage.prefix.eviction import EvictionQueue
from skippy_stage.prefix.tree import Node, Root

ROOT = Root("")


def node(name: int, start: int = 0, tokens: int = 4) -> Node:
    return Node(ROOT, (name,) * tokens, name, start)


def offered(queue: EvictionQueue, *nodes: Node) -> None:
    for one in nodes:
        queue.touch(one)
        queue.offer(one)


def popped(queue: EvictionQueue) -> list[int]:
    names = []
    while (found := queue.pop()) is not None:
        names.append(found.block)
    return names


def test_of_nodes_used_at_the_same_time_the_cheapest_goes_first() -> None:
    queue = EvictionQueue()
    offered(queue, node(1, start=8000), node(2, start=16), node(3), node(4, start=8000, tokens=1))
    assert popped(queue) == [4, 3, 2, 1]


def test_what_was_not_used_for_long_goes_before_what_is_cheap() -> None:
    """Every eviction makes what is used after it count for more."""
    queue = EvictionQueue()
    dear = node(1, start=8000)
    offered(queue, dear)
    for name in range(2, 9):
        cheap = node(name)
        offered(queue, cheap)
        found = queue.pop()
        assert found is not None
        queue.evicted(found)
        if found is dear:
            break
    assert 3 <= name <= 5, "not at once, and not never"


def test_an_eviction_out_of_turn_takes_nothing_back() -> None:
    """A node above the last one evicted may have been used longer ago."""
    queue = EvictionQueue()
    old = node(1)
    queue.touch(old)
    for name in (2, 3):
        later = node(name)
        queue.touch(later)
        queue.evicted(later)
    queue.evicted(old)
    offered(queue, node(4))
    queue.offer(later)
    assert popped(queue) == [3, 4]


def test_an_offer_is_withdrawn_or_renewed() -> None:
    queue = EvictionQueue()
    one, two, three = node(1), node(2, start=10), node(3, start=20)
    offered(queue, one, two, three)
    queue.withdraw(two)
    queue.withdraw(two)
    one.priority = 1000.0
    queue.offer(one)
    assert len(queue) == 2
    queue.check_integrity()
    assert popped(queue) == [3, 1]
    assert len(queue) == 0
    queue.check_integrity()


def test_renewed_offers_do_not_pile_up() -> None:
    queue = EvictionQueue()
    nodes = [node(name) for name in range(10)]
    for turn in range(1000):
        offered(queue, nodes[turn % 10])
        assert len(queue._heap) <= 2 * 10 + 65
    queue.check_integrity()
    assert sorted(popped(queue)) == list(range(10))
