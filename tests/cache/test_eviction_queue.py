"""The eviction queue alone: order, lazy deletion, bounded size."""

from __future__ import annotations

import pytest

from tierax.cache.eviction_queue import EvictionQueue
from tierax.cache.policies.lru import LRU
from tierax.cache.radix_tree import Node, RadixTree


def make_leaves(ranks: list[int], depths: list[int]) -> list[Node]:
    tree = RadixTree(page_bytes=4)
    leaves: list[Node] = []
    for index, (rank, depth) in enumerate(zip(ranks, depths, strict=True)):
        node = tree.add(tree.root(b""), index.to_bytes(4) * depth, [0] * depth)
        node.rank = rank
        leaves.append(node)
    return leaves


def test_least_rank_then_deepest_then_first_come() -> None:
    queue = EvictionQueue(LRU())
    leaves = make_leaves(ranks=[2, 1, 1, 1, 0], depths=[9, 1, 3, 1, 1])
    for leaf in leaves:
        queue.add(leaf)
    queue.check(leaves)
    assert [leaves.index(queue.pop()) for _ in leaves] == [4, 2, 1, 3, 0]
    with pytest.raises(IndexError):
        queue.pop()


def test_discarded_and_renewed_entries() -> None:
    queue = EvictionQueue(LRU())
    a, b, c = leaves = make_leaves(ranks=[1, 2, 3], depths=[1, 1, 1])
    for leaf in leaves:
        queue.add(leaf)
    queue.discard(b)
    queue.discard(b)
    queue.discard(a)
    a.rank = 4
    queue.add(a)
    queue.check([a, c])
    assert [queue.pop(), queue.pop()] == [c, a]


def test_dead_entries_do_not_pile_up() -> None:
    queue = EvictionQueue(LRU())
    leaves = make_leaves(ranks=[0] * 5, depths=[1] * 5)
    for tick in range(1, 10_000):
        leaf = leaves[tick % 5]
        queue.discard(leaf)
        leaf.rank = tick
        queue.add(leaf)
    assert len(queue._heap) <= 2 * 5 + 64
    queue.check(leaves)
    assert [leaves.index(queue.pop()) for _ in leaves] == [0, 1, 2, 3, 4]
