"""LRU, or the policy that has surely hit more than it of late, judged by ghost caches.

Sampling by a hash of the name keeps a small cache true to the large one (Waldspurger et al., "Efficient MRC construction
with SHARDS", FAST 2015).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ..eviction_queue import EvictionQueue
from .greedy_dual import LFU
from .lru import LRU
from .policy import Evictable, EvictionPolicy, Use
from .s3fifo import S3FIFO
from .slru import SLRU

EXPERTS: tuple[Callable[[], EvictionPolicy], ...] = (LRU, LFU, SLRU, S3FIFO)
"""The first is at home: the others must prove to be better."""
MOST_FOLLOWED = 1024
"""Items that a ghost cache holds at most: where it would hold more, only one item in 2, 4, 8 … is followed."""
LOOKS = 512
"""Followed uses between two decisions."""
FADE = 0.9
"""What a hit still counts for at the next decision."""
SURE = 2.0
"""Standard deviations by which another must lead to take over."""


class _Rank(NamedTuple):
    expert: int
    """In whose order it waits."""
    ranks: tuple[Any, ...]
    """What each expert remembers of it."""


class _View:
    """An item as one expert sees it: with the rank that this expert gave it."""

    __slots__ = ("_item", "rank")

    def __init__(self, item: Evictable, rank: Any) -> None:
        self._item, self.rank = item, rank

    @property
    def end(self) -> int:
        return self._item.end

    @property
    def size(self) -> int:
        return self._item.size

    @property
    def identity(self) -> Hashable:
        return self._item.identity

    @property
    def identities(self) -> Sequence[Hashable]:
        return self._item.identities

    @property
    def head(self) -> Evictable | None:
        return None


class _Ghost:
    """An item of a ghost cache: a name, no pages."""

    __slots__ = ("end", "identities", "identity", "rank", "size")
    head = None

    def __init__(self, item: Evictable) -> None:
        self.identity, self.end, self.size = item.identity, item.end, item.size
        self.identities = (item.identity,)
        self.rank: Any = None


class _GhostCache:
    """Which sampled items a policy of its own would hold."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._queue: EvictionQueue[_Ghost] = EvictionQueue(policy)
        self._items: dict[Hashable, _Ghost] = {}
        self._pages = 0

    def __len__(self) -> int:
        return len(self._items)

    def use(self, item: Evictable, use: Use, capacity: float) -> int:
        """Pages that it hits."""
        ghost, hit = self._items.get(item.identity), 0
        if ghost is None:
            ghost = self._items[item.identity] = _Ghost(item)
        else:
            hit = min(ghost.size, item.size)
            self._queue.discard(ghost)
            self._pages -= ghost.size
            ghost.size = item.size
        self._policy.touch(ghost, use)
        self._queue.add(ghost)
        self._pages += ghost.size
        while self._pages > capacity and len(self._queue) > 1:
            gone = self._queue.pop(use)
            self._policy.evicted(gone)
            self._pages -= gone.size
            del self._items[gone.identity]
        return hit

    def thin(self, one_in: int) -> None:
        """Forgets what is followed no longer."""
        for ghost in [ghost for name, ghost in self._items.items() if not _followed(name, one_in)]:
            self._queue.discard(ghost)
            self._pages -= ghost.size
            del self._items[ghost.identity]


class Adaptive(EvictionPolicy):
    """LRU, until LFU, SLRU or S3-FIFO leads it in ghost caches by more than chance would have it; then that one, while it leads.

    A lead is a sum of differences, use by use, so that its standard deviation is known from the same differences: what hit in
    all ghost caches says nothing, and a few long runs say little. All of them rank every item. What waits in the order of one that has been left is queued anew, at the next evictions.
    """

    def __init__(self) -> None:
        self._experts = [make() for make in EXPERTS]
        self._first_lane = [sum(e.lanes for e in self._experts[:at]) for at in range(len(self._experts))]
        self.lanes = sum(expert.lanes for expert in self._experts)
        self._ghosts = [_GhostCache(make()) for make in EXPERTS]
        self._chosen = 0
        self._leads = [0.0] * len(EXPERTS)
        """Pages that each has hit more than LRU, fading."""
        self._squares = [0.0] * len(EXPERTS)
        """Of the differences that `_leads` sums, fading alike."""
        self._looks = 0
        self._one_in = 1
        """Of how many items one is followed: a power of two, so that what is still followed when it doubles was so before."""
        self._moving: int | None = None
        """The lane of a former expert that is being emptied."""
        self._full = False
        """Room was needed; until then nothing is judged."""

    def touch(self, item: Evictable, use: Use) -> None:
        ranks = (None,) * len(self._experts) if item.rank is None else item.rank.ranks
        views = [_View(item, rank) for rank in ranks]
        for expert, view in zip(self._experts, views, strict=True):
            expert.touch(view, use)
        item.rank = _Rank(self._chosen, tuple(view.rank for view in views))
        if self._full and _followed(item.identity, self._one_in):
            self._judge(item, use)

    def priority(self, item: Evictable) -> Any:
        return self._experts[item.rank.expert].priority(_view(item))

    def lane(self, item: Evictable) -> int:
        expert = item.rank.expert
        return self._first_lane[expert] + self._experts[expert].lane(_view(item))

    def choose(self, firsts: Sequence[Evictable | None], pages: Sequence[int], use: Use) -> int:
        self._full = True
        expert, start = self._experts[self._chosen], self._first_lane[self._chosen]
        own = range(start, start + expert.lanes)
        self._moving = next((lane for lane, item in enumerate(firsts) if item and lane not in own), None)
        if self._moving is not None:
            return self._moving
        views = [None if firsts[lane] is None else _view(firsts[lane]) for lane in own]
        chosen = expert.choose(views, pages[start : start + expert.lanes], use) if expert.lanes > 1 else 0
        # An empty lane passes to another of the same expert.
        filled = chosen if views[chosen] is not None else next(at for at, view in enumerate(views) if view)
        return start + filled

    def spare(self, item: Evictable, use: Use) -> bool:
        if self._moving is not None:
            item.rank = item.rank._replace(expert=self._chosen)
            return True
        at, view = item.rank.expert, _view(item)
        spared = self._experts[at].spare(view, use)
        ranks = item.rank.ranks
        item.rank = item.rank._replace(ranks=(*ranks[:at], view.rank, *ranks[at + 1 :]))
        return spared

    def evicted(self, item: Evictable) -> None:
        if item.rank is not None:
            for expert, rank in zip(self._experts, item.rank.ranks, strict=True):
                expert.evicted(_View(item, rank))

    def _judge(self, item: Evictable, use: Use) -> None:
        hits = [ghost.use(item, use, self.capacity / self._one_in) for ghost in self._ghosts]
        for at, hit in enumerate(hits):
            self._leads[at] += hit - hits[0]
            self._squares[at] += (hit - hits[0]) ** 2
        if max(map(len, self._ghosts)) > MOST_FOLLOWED:
            self._one_in *= 2
            for ghost in self._ghosts:
                ghost.thin(self._one_in)
        self._looks += 1
        if self._looks % LOOKS == 0:
            self._decide()

    def _decide(self) -> None:
        # Whoever is in charge has the benefit of the doubt: a change costs a look at all that waits.
        worth = [lead - SURE * squares**0.5 for lead, squares in zip(self._leads, self._squares, strict=True)]
        worth[self._chosen] = self._leads[self._chosen]
        best = max(range(len(worth)), key=worth.__getitem__)
        if worth[best] > worth[self._chosen]:
            self._chosen = best
        self._leads = [FADE * lead for lead in self._leads]
        self._squares = [FADE * squares for squares in self._squares]


def _followed(name: Hashable, one_in: int) -> bool:
    return one_in == 1 or zlib.crc32(repr(name).encode()) % one_in == 0


def _view(item: Any) -> _View:
    """As the expert sees it in whose order it waits."""
    return _View(item, item.rank.ranks[item.rank.expert])
