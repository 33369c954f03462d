"""The items of a tier that may be evicted next, in the policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from .policies.policy import Evictable, EvictionPolicy, Use

MOST_SPARES = 1000
"""In one `pop`: some milliseconds. After them the next item goes unasked."""

Item = TypeVar("Item", bound=Evictable)


class _Entry(NamedTuple, Generic[Item]):
    """What the policy said of an item when it entered, and its place in the two heaps."""

    lane: int
    place: tuple[Any, int, int, Item]
    """Priority, then deeper first, then older entry first."""
    expiry: tuple[float, int, int, Item] | None
    size: int
    """Pages then; a run that has lost its head since counts as it was."""


class EvictionQueue(Generic[Item]):
    """A priority queue per lane, with lazy deletion: every operation is O(log n) amortized.

    An item's priority is asked once, when it enters; an item whose rank changes is discarded before and added after.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._entries: dict[Item, _Entry[Item]] = {}
        """The valid entries; whatever else is in the heaps is ignored."""
        self._lanes: list[list[tuple[Any, int, int, Item]]] = [[] for _ in range(policy.lanes)]
        self._expiries: list[tuple[float, int, int, Item]] = []
        self._pages = [0] * policy.lanes
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, item: Item) -> None:
        """Lets the item wait; it has been touched, and does not wait yet."""
        assert item not in self._entries, "the item waits already"
        self._count += 1
        lane, expires = self._policy.lane(item), self._policy.expires(item)
        place = (self._policy.priority(item), -item.end, self._count, item)
        expiry = None if expires is None else (expires, -item.end, self._count, item)
        self._entries[item] = _Entry(lane, place, expiry, item.size)
        self._pages[lane] += item.size
        heapq.heappush(self._lanes[lane], place)
        if expiry is not None:
            heapq.heappush(self._expiries, expiry)
        self._forget_dead_entries()

    def discard(self, item: Item) -> None:
        """The item waits no longer, if it did."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            self._pages[entry.lane] -= entry.size

    def pop(self, use: Use) -> Item:
        """Removes and returns the item to evict first, after the policy has spared those it wants to keep.

        Raises IndexError if nothing waits.
        """
        for _ in range(MOST_SPARES):
            item = self._pop_least(use)
            if not self._policy.spare(item, use):
                return item
            self.add(item)
        return self._pop_least(use)

    def expired(self, now: float) -> Item | None:
        """Removes and returns an item whose time has come, the earliest first; None if there is no such item."""
        while self._expiries and self._expiries[0][0] <= now:
            expiry = heapq.heappop(self._expiries)
            item = expiry[-1]
            entry = self._entries.get(item)
            if entry is not None and entry.expiry is expiry:
                self.discard(item)
                return item
        return None

    def check(self, expected: Iterable[Item]) -> None:
        """Asserts that exactly the `expected` items wait here, where the policy wants them still."""
        assert self._entries.keys() == set(expected), "the queue does not hold exactly the evictable items"
        for heap, name in ((self._expiries, "expiry"), *((lane, "place") for lane in self._lanes)):
            for child in range(1, len(heap)):
                assert heap[(child - 1) // 2][:3] <= heap[child][:3], f"heap order by {name}"
        places = [{id(place) for place in lane} for lane in self._lanes]
        expiries = {id(expiry) for expiry in self._expiries}
        for item, entry in self._entries.items():
            assert entry.lane == self._policy.lane(item), "stale lane"
            assert entry.place[:2] == (self._policy.priority(item), -item.end), "stale priority or depth"
            assert id(entry.place) in places[entry.lane], "a waiting item has no entry in its lane"
            assert entry.size >= item.size, "an item has grown while it waited"
            expires = self._policy.expires(item)
            assert (entry.expiry[0] if entry.expiry else None) == expires, "stale expiry"
            assert entry.expiry is None or id(entry.expiry) in expiries, "an expiry has no entry"
        for lane, pages in enumerate(self._pages):
            assert pages == sum(entry.size for entry in self._entries.values() if entry.lane == lane)

    def _pop_least(self, use: Use) -> Item:
        if len(self._lanes) == 1:
            item = self._first(self._lanes[0])
        else:
            firsts = [self._first(heap) for heap in self._lanes]
            item = firsts[self._policy.choose(firsts, self._pages, use)]
            if item is None:
                item = next((first for first in firsts if first is not None), None)
        if item is None:
            raise IndexError("nothing waits to be evicted")
        heapq.heappop(self._lanes[self._entries[item].lane])
        self.discard(item)
        return item

    def _first(self, heap: list[tuple[Any, int, int, Item]]) -> Item | None:
        """The item that goes first in a lane; what is dead before it is forgotten."""
        while heap:
            item = heap[0][-1]
            entry = self._entries.get(item)
            if entry is not None and entry.place is heap[0]:
                return item
            heapq.heappop(heap)
        return None

    def _forget_dead_entries(self) -> None:
        most = 2 * len(self._entries) + 64
        if sum(map(len, self._lanes)) > most:
            for heap in self._lanes:
                heap.clear()
            for entry in self._entries.values():
                self._lanes[entry.lane].append(entry.place)
            for heap in self._lanes:
                heapq.heapify(heap)
        if len(self._expiries) > most:
            self._expiries = [entry.expiry for entry in self._entries.values() if entry.expiry is not None]
            heapq.heapify(self._expiries)
