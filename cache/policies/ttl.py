"""Time to live."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from .policy import Evictable, EvictionPolicy, Use

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class _Rank(NamedTuple):
    tick: int
    now: float


class TTL(EvictionPolicy):
    """Drops what was not used for `seconds`, even when there is room; before that, LRU.

    A tail is never used without its head, so it does not outlive it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", option or "")
        if match is None or float(match[1]) == 0:
            raise ValueError(
                "the time without use is a number and one of s, m, h, d, as in ttl=3600s or ttl=1h"
            )
        return cls(float(match[1]) * UNITS[match[2]])

    def touch(self, item: Evictable, use: Use) -> None:
        item.rank = _Rank(use.tick, use.now)

    def priority(self, item: Evictable) -> int:
        return item.rank.tick

    def expires(self, item: Evictable) -> float:
        return item.rank.now + self._seconds
