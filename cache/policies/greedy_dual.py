"""Greedy dual: a value for each item on top of an inflation that lets old values sink.

Cao and Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997; with frequencies, as LFU-DA and GDSF: Cherkasova,
"Improving WWW proxies performance with greedy-dual-size-frequency caching policy", HP Labs HPL-98-69R1, 1998.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from .policy import Evictable, EvictionPolicy, Use

EVEN_DEPTH = 256
"""Pages of context at which attention costs as much as the rest of the model, for GDSF unless told otherwise."""


class _Rank(NamedTuple):
    inflation: float
    """At the last use."""
    uses: int
    tick: int


class LFU(EvictionPolicy):
    """Evicts what was used least often, of equals what was used longest ago; counts age.

    Every count starts from the inflation at its last use, which is the value of what was evicted last: a star that is no
    longer used is overtaken after as many turnovers of the cache as it has uses.
    """

    def __init__(self) -> None:
        self._inflation = 0.0

    def touch(self, item: Evictable, use: Use) -> None:
        uses = 0 if item.rank is None else item.rank.uses
        item.rank = _Rank(self._inflation, uses + 1, use.tick)

    def priority(self, item: Evictable) -> tuple[float, int]:
        return item.rank.inflation + item.rank.uses * self._value(item), item.rank.tick

    def spare(self, item: Evictable, use: Use) -> bool:
        # Here rather than in `evicted`: a run that loses only its tail has been valued too.
        self._inflation = max(self._inflation, self.priority(item)[0])
        return False

    def _value(self, item: Evictable) -> float:
        """What a use of the item's last page saves."""
        return 1.0


class GDSF(LFU):
    """LFU that weighs a use by what it costs to compute a page again.

    To prefill the n-th page of a sequence costs 1 + n / `even_depth`: the dense layers cost the same for every page, attention
    grows with the context before it. In a transformer with 12 h^2 weights per layer of width h both are equal at
    6 h tokens: 216 pages of 16 tokens at h = 576, 1536 pages at h = 4096. All pages have the same size, and a run loses
    its last page first, so value per size is the cost of that page.
    """

    def __init__(self, even_depth: float = EVEN_DEPTH) -> None:
        super().__init__()
        self._even_depth = even_depth

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        if option is None:
            return cls()
        if not option.isascii() or not option.isdigit() or int(option) < 1:
            raise ValueError(
                "the option is the depth in pages at which attention costs as much as the rest, as in gdsf=256"
            )
        return cls(int(option))

    def _value(self, item: Evictable) -> float:
        return 1 + item.end / self._even_depth
