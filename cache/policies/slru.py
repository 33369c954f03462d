"""Segmented LRU (Karedla, Love and Wherry, "Caching strategies to improve disk system performance", 1994)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .policy import Evictable, EvictionPolicy, Use

PROBATION, PROTECTED = 0, 1
PROTECTED_SHARE = 0.8
"""Of the evictable pages: protection beyond this is taken back, least recently used first."""


class _Rank(NamedTuple):
    lane: int
    order: int
    """Of uses and demotions: ticks are too coarse to tell which of the two came first."""


class SLRU(EvictionPolicy):
    """What was used once waits on probation, what was used again is protected; each in LRU order.

    Probation gives first, so a scan of things used once pushes out nothing that is protected. What loses its
    protection gets a second chance at the fresh end of probation. That is done when room is needed, which puts it
    in the same place as doing it at once.
    """

    lanes = 2

    def __init__(self) -> None:
        self._order = 0
        self._demoting = False
        """Whether `choose` has asked for a protected item only to demote it."""

    def touch(self, item: Evictable, use: Use) -> None:
        self._enter(item, PROBATION if item.rank is None else PROTECTED)

    def priority(self, item: Evictable) -> int:
        return item.rank.order

    def lane(self, item: Evictable) -> int:
        return item.rank.lane

    def choose(self, firsts: Sequence[Evictable | None], pages: Sequence[int], use: Use) -> int:
        self._demoting = pages[PROTECTED] > PROTECTED_SHARE * sum(pages)
        return PROTECTED if self._demoting else PROBATION

    def spare(self, item: Evictable, use: Use) -> bool:
        if self._demoting:
            self._enter(item, PROBATION)
        return self._demoting

    def _enter(self, item: Evictable, lane: int) -> None:
        self._order += 1
        item.rank = _Rank(lane, self._order)
