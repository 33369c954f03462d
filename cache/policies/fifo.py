"""First in, first out."""

from __future__ import annotations

from .policy import Evictable, EvictionPolicy, Use


class FIFO(EvictionPolicy):
    """Evicts what came first, however often it was used since."""

    def touch(self, item: Evictable, use: Use) -> None:
        if item.rank is None:
            item.rank = use.tick

    def priority(self, item: Evictable) -> int:
        return item.rank
