"""Least recently used."""

from __future__ import annotations

from ..radix_tree import Node


class LRU:
    """Evicts what has been out of use for longest."""

    def touch(self, node: Node, tick: int) -> None:
        node.rank = tick

    def priority(self, node: Node) -> int:
        return node.rank
