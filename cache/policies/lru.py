"""Least recently used."""

from __future__ import annotations

from .policy import Evictable, EvictionPolicy, Use


class LRU(EvictionPolicy):
    """Evicts what has been out of use for longest."""

    def touch(self, item: Evictable, use: Use) -> None:
        item.rank = use.tick

    def priority(self, item: Evictable) -> int:
        return item.rank
