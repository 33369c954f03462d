"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .policy import Evictable, EvictionPolicy, Use

SMALL, MAIN = 0, 1
SMALL_SHARE = 0.1
"""Of the evictable pages: a larger small queue gives first."""
MOST_USES = 3


class _Rank(NamedTuple):
    lane: int
    order: int
    """When it was queued: ticks are too coarse to order what is queued and what is queued again."""
    uses: int
    """Since it was queued, at most `MOST_USES`."""


class S3FIFO(EvictionPolicy):
    """A small queue for what is new, a main queue for what proved useful, and a memory of what has just gone.

    What leaves the small queue goes on to the main one if it was used at least twice there, else out, and its name
    among the ghosts. What comes back while it is a ghost starts in the main queue. The main queue gives its
    oldest, but one with uses is queued again with one less. Whatever is part of a longer hit counts as used, so a
    shared head is promoted before the tails below it.
    """

    lanes = 2

    def __init__(self) -> None:
        self._order = 0
        self._ghosts: OrderedDict[Hashable, int] = OrderedDict()
        """Pages by identity, oldest first; as many pages as the main queue should have."""
        self._ghost_pages = 0
        self._pages = 0

    def touch(self, item: Evictable, use: Use) -> None:
        if item.rank is None:
            self._enter(item, MAIN if self._take_ghost(item) else SMALL, uses=0)
        elif item.rank.uses < MOST_USES:
            item.rank = item.rank._replace(uses=item.rank.uses + 1)

    def priority(self, item: Evictable) -> int:
        return item.rank.order

    def lane(self, item: Evictable) -> int:
        return item.rank.lane

    def choose(self, firsts: Sequence[Evictable | None], pages: Sequence[int], use: Use) -> int:
        self._pages = sum(pages)
        return SMALL if pages[SMALL] >= SMALL_SHARE * self._pages else MAIN

    def spare(self, item: Evictable, use: Use) -> bool:
        lane, _, uses = item.rank
        if uses < (2 if lane == SMALL else 1):
            return False
        self._enter(item, MAIN, uses=0 if lane == SMALL else uses - 1)
        return True

    def evicted(self, item: Evictable) -> None:
        if item.rank is None or item.rank.lane != SMALL:
            return
        self._take_ghost(item)
        self._ghosts[item.identity] = item.size
        self._ghost_pages += item.size
        while self._ghost_pages > (1 - SMALL_SHARE) * self._pages:
            self._ghost_pages -= self._ghosts.popitem(last=False)[1]

    def _enter(self, item: Evictable, lane: int, uses: int) -> None:
        self._order += 1
        item.rank = _Rank(lane, self._order, uses)

    def _take_ghost(self, item: Evictable) -> bool:
        """Takes the item's contents off the ghosts; returns whether they were there."""
        pages = self._ghosts.pop(item.identity, 0)
        self._ghost_pages -= pages
        return pages > 0
