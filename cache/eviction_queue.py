"""The nodes that may be evicted next, in the policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from .policies.registry import EvictionPolicy
from .radix_tree import Node

Entry = tuple[Any, int, int, Node]
"""The policy's priority, then deeper first, then older entry first."""


class EvictionQueue:
    """A priority queue with lazy deletion: every operation is O(log n) amortized.

    A node's priority is asked once, when it enters; a node whose rank changes is discarded before and added after.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[Entry] = []
        self._entries: dict[Node, Entry] = {}
        """The valid entries; all others in the heap are ignored."""
        self._count = 0

    def add(self, node: Node) -> None:
        self._count += 1
        entry = (self._policy.priority(node), -node.end, self._count, node)
        self._entries[node] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._entries.pop(node, None)

    def pop(self) -> Node:
        """Removes and returns the node to evict first; there must be one."""
        while True:
            entry = heapq.heappop(self._heap)
            node = entry[3]
            if self._entries.get(node) is entry:
                del self._entries[node]
                return node

    def check(self, expected: Iterable[Node]) -> None:
        """Asserts that exactly the `expected` nodes wait here, with priorities and depths that hold."""
        assert self._entries.keys() == set(expected), "the queue does not hold exactly the unlocked leaves"
        alive = [entry for entry in self._heap if self._entries.get(entry[3]) is entry]
        assert len(alive) == len(self._entries), "a waiting node has no entry in the heap"
        for priority, depth, _, node in alive:
            assert priority == self._policy.priority(node), "stale priority"
            assert depth == -node.end, "stale depth"
        for child in range(1, len(self._heap)):
            assert self._heap[(child - 1) // 2][:3] <= self._heap[child][:3], "heap order"
