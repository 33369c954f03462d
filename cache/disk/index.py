"""What the disk tier holds, in memory: no I/O, no clock, no arrays, one thread.

The pages of a namespace form a forest, heads before tails. A page is reserved, then written, then stored:

    absent --reserve--> writing --stored--> stored --evicted, expired, removed, cleared--> absent
                           '---------------failed, or its head left------------------------^

Whatever leaves the index is returned, to be deleted from the store. It counts as gone at once, so these deletes must be
ordered before the writes that are reserved later; `PageStore` then keeps them in that order.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence

from ..eviction_queue import EvictionQueue
from ..page_events import PageListener
from ..page_keys import KEY_BYTES, PageKey
from ..policies.lru import LRU
from ..policies.policy import EvictionPolicy, Use
from .forest import Forest
from .names import Stored
from .page import DiskStats, Listing, NamespaceStats, Page

_SNAPSHOT = struct.Struct("<8sI")
_SNAPSHOT_MAGIC = b"TIERAXI1"


class DiskIndex:
    """Which pages the store holds, at most `capacity` bytes of them (None: no bound, for stores that others keep).

    Records being written count as bytes. A page is evictable while it is stored, nobody locks it, and no page hangs below
    it. Methods that return keys return what must be deleted from the store, tails before heads.
    """

    def __init__(self, capacity: int | None, policy: EvictionPolicy | None = None) -> None:
        self.capacity = capacity
        self.stats = DiskStats()
        self.bytes = 0
        """Of all pages, those being written included."""
        self._policy = policy or LRU()
        self._queue: EvictionQueue[Page] = EvictionQueue(self._policy)
        self._forest = Forest()
        """All pages, those being written included."""
        self._locks: dict[bytes, int] = {}
        """Users by key, whether or not the page is (still) there."""
        self._held_bytes = 0
        """Of pages that are locked or being written."""
        self._writing_bytes = 0
        self._dropped: set[PageKey] = set()
        """Left the index while they were being written; the outcome of the write is not known yet."""
        self._limit = capacity
        """`capacity`, or less while the file system is short of space."""
        self._use = Use(0, 0.0)
        """The latest."""
        self._remembered: dict[bytes, int] = {}
        """Key -> place in the order of eviction, from a snapshot; used up by `add_listed`."""
        self.listener: PageListener | None = None
        """Who hears of every page that is stored or leaves."""

    def __len__(self) -> int:
        return len(self._forest)

    def __contains__(self, key: PageKey) -> bool:
        """Whether the page is stored or being written."""
        return self._forest.find(key) is not None

    def is_stored(self, key: PageKey) -> bool:
        page = self._forest.find(key)
        return page is not None and page.stored

    def match(self, keys: Sequence[PageKey]) -> int:
        """How many of the leading `keys`, pages that follow each other, are stored."""
        return next((i for i, key in enumerate(keys) if not self.is_stored(key)), len(keys))

    # Writing.

    def reserve(self, key: PageKey, nbytes: int, use: Use | None = None) -> list[PageKey] | None:
        """Makes room for a page of `nbytes` on disk (its whole record), which is to be written now.

        Returns what must be deleted first; an empty list also if the page is there or being written already (see `in`:
        then it need not be written, and the caller owes no `stored`). None: it cannot be had now, as its head is
        absent, everything else is in use, or an earlier write of it that was given up has not ended; nothing has changed.
        `use` counts as its first use, the latest use known if it is left out.
        """
        if key in self:
            return []
        page = None if key in self._dropped else self._forest.place(key, nbytes, stored=False)
        unheld = None if self._limit is None else self._limit - self._held_bytes
        if page is None or (unheld is not None and nbytes > unheld):
            self.stats.refused_pages += 1
            return None
        self._note(use)
        self._policy.touch(page, use or self._use)
        # First of all, it keeps its head from being evicted for it.
        self._attach(page)
        victims = self._make_room("capacity", all_or_nothing=True)
        if victims is None:
            self._detach(page)
            self.stats.refused_pages += 1
        return victims

    def stored(self, key: PageKey) -> None:
        """The write of a reserved page has succeeded. A page that has left the index meanwhile stays out."""
        self._dropped.discard(key)
        page = self._forest.find(key)
        if page is None or page.stored:
            return
        page.stored = True
        self._writing_bytes -= page.nbytes
        if key.key not in self._locks:
            self._held_bytes -= page.nbytes
        self.stats.stored_pages += 1
        self.stats.stored_bytes += page.nbytes
        self._requeue(page)
        if self.listener is not None:
            self.listener.stored([key])

    def failed(self, key: PageKey) -> list[PageKey]:
        """The write of a reserved page has failed: it may be reserved again. What hangs below it goes as well."""
        if key in self._dropped:
            self._dropped.discard(key)
            return []
        page = self._forest.find(key)
        if page is None or page.stored:
            return []
        gone = self._remove(page, "failed")
        self._dropped.discard(key)
        return gone

    # Use.

    def touch(self, keys: Iterable[PageKey], use: Use) -> None:
        """A use of these pages, heads first; those that are not here are passed over."""
        self._note(use)
        for key in keys:
            page = self._forest.find(key)
            if page is not None:
                self._queue.discard(page)
                self._policy.touch(page, use)
                self._requeue(page)

    def keep(self, keys: Iterable[PageKey]) -> None:
        """Somebody is about to read these pages: of interest where others write to the store (shared_index.py)."""

    def lock(self, keys: Iterable[PageKey]) -> None:
        """One more user of each page: it is not evicted until `unlock`, nor are its heads. (`remove` and `clear` take
        it all the same: its reader will miss.)
        """
        locks = self._locks
        for key in keys:
            users = locks[key.key] = locks.get(key.key, 0) + 1
            if users == 1 and (page := self._forest.find(key)) is not None and page.stored:
                self._held_bytes += page.nbytes
                self._queue.discard(page)

    def unlock(self, keys: Iterable[PageKey]) -> None:
        """The end of a `lock`. Raises ValueError for a key that is not locked."""
        locks = self._locks
        for key in keys:
            users = locks.get(key.key, 0)
            if users == 0:
                raise ValueError(f"page {key.key.hex()} is not locked")
            if users > 1:
                locks[key.key] = users - 1
                continue
            del locks[key.key]
            page = self._forest.find(key)
            if page is not None and page.stored:
                self._held_bytes -= page.nbytes
                self._requeue(page)

    # Leaving.

    def remove(self, key: PageKey, reason: str) -> list[PageKey]:
        """Drops a page that proved bad or absent, and all that hangs below it, whoever uses them."""
        page = self._forest.find(key)
        return [] if page is None else self._remove(page, reason)

    def clear(self, namespace: bytes | None = None) -> list[PageKey]:
        """Drops everything, or everything of a namespace, whoever uses it."""
        heads = self._forest.heads(namespace)
        return [key for head in heads for key in self._remove(head, "cleared")]

    def expire(self, now: float) -> list[PageKey]:
        """Drops what its policy keeps no longer than until `now` (seconds of the injected clock)."""
        victims = []
        while (page := self._queue.expired(now)) is not None:
            self._detach(page)
            victims.append(page)
        return self._evicted(victims, "ttl")

    def keep_free(self, free: int, floor: int) -> list[PageKey]:
        """Told that the file system has `free` bytes left, of which `floor` are not for the cache, shrinks what this index
        may hold, or lets it grow up to `capacity` again.

        Deleted records must have been given back by the file system before the next call (some seconds).
        """
        limit = max(0, self.bytes - self._writing_bytes + free - floor)
        self._limit = limit if self.capacity is None else min(limit, self.capacity)
        return self._make_room("space_floor") or []

    # Start.

    def restore(self, snapshot: bytes) -> bool:
        """Recalls the order of use from a `snapshot`, for the next `add_listed`; False if it is not a whole one."""
        if len(snapshot) < _SNAPSHOT.size:
            return False
        magic, checksum = _SNAPSHOT.unpack_from(snapshot)
        keys = snapshot[_SNAPSHOT.size :]
        if magic != _SNAPSHOT_MAGIC or len(keys) % KEY_BYTES or zlib.crc32(keys) != checksum:
            return False
        self._remembered = {keys[i : i + KEY_BYTES]: i for i in range(0, len(keys), KEY_BYTES)}
        return True

    def add_listed(
        self,
        listed: Iterable[Stored],
        nbytes: int = 0,
        use: Use | None = None,
        *,
        spare_orphans: bool = False,
    ) -> list[PageKey]:
        """Takes in what the store was found to hold; `nbytes` is the size of those of which it did not tell.

        For the start, or to learn what others have stored since. Returns what has no head, is parts alone or has a name that
        contradicts another (unless `spare_orphans`: where others write, heads may still come), and what is beyond the capacity. `use` counts as the use of all; if a
        snapshot was restored, those in it are ordered before it.
        """
        self._note(use)
        orphans = [page.key for page in self._take_in(listed, nbytes, use)]
        self.stats.evicted_pages["orphan"] += 0 if spare_orphans else len(orphans)
        surplus = self._make_room("capacity") or []
        return surplus if spare_orphans else surplus + orphans[::-1]

    def compare(self, listed: Sequence[Stored]) -> Listing:
        """What a list of all that the store holds has to tell. For any thread: a large store takes a while to go through."""
        return self._forest.compare(listed)

    def take_listing(self, listing: Listing, nbytes: int, use: Use) -> list[PageKey]:
        """`add_listed` of what others have stored since."""
        return self.add_listed(listing.unknown, nbytes, use, spare_orphans=True)

    def snapshot(self) -> bytes:
        """The keys of all stored pages in the order of eviction as far as it is known; costs a sort of them all."""
        policy = self._policy
        pages = sorted(
            (page for page in self._forest if page.stored),
            key=lambda page: (policy.lane(page), policy.priority(page), -page.end),
        )
        keys = b"".join(page.key.key for page in pages)
        return _SNAPSHOT.pack(_SNAPSHOT_MAGIC, zlib.crc32(keys)) + keys

    # Views.

    def stored_keys(self) -> Iterator[PageKey]:
        """Every page that is stored, heads before tails."""
        return (page.key for page in self._forest if page.stored)

    def namespaces(self) -> dict[bytes, NamespaceStats]:
        """What every namespace has here; a walk over all pages."""
        return self._forest.namespaces()

    def check(self) -> None:
        """Asserts all invariants."""
        pages = list(self._forest)
        self._forest.check()
        assert not any(page.key in self._dropped for page in pages), "a dropped write is here"
        assert self.bytes == sum(page.nbytes for page in pages), "bytes"
        assert self._writing_bytes == sum(page.nbytes for page in pages if not page.stored), (
            "bytes being written"
        )
        assert self._held_bytes == sum(page.nbytes for page in pages if self._is_held(page)), "held bytes"
        self._check_capacity()
        assert all(count > 0 for count in self._locks.values()), "a lock that nobody holds"
        self._queue.check(page for page in pages if not page.children and not self._is_held(page))

    def _check_capacity(self) -> None:
        assert self.capacity is None or self.bytes <= self.capacity, f"{self.bytes} bytes of {self.capacity}"

    # One function each for: coming, going, waiting to be evicted.

    def _is_held(self, page: Page) -> bool:
        return not page.stored or page.key.key in self._locks

    def _attach(self, page: Page) -> None:
        """The caller sees to it that `page` waits for eviction, once it has been touched."""
        self._forest.add(page)
        if page.parent is not None:
            self._queue.discard(page.parent)
        self._count(page, 1)

    def _detach(self, page: Page) -> None:
        self._queue.discard(page)
        self._forest.remove(page)
        self._count(page, -1)
        if page.parent is not None:
            self._requeue(page.parent)

    def _count(self, page: Page, sign: int) -> None:
        self.bytes += sign * page.nbytes
        if not page.stored:
            self._writing_bytes += sign * page.nbytes
        if self._is_held(page):
            self._held_bytes += sign * page.nbytes

    def _requeue(self, page: Page) -> None:
        """Lets the page wait for eviction if, and only if, it may be evicted."""
        self._queue.discard(page)
        if not page.children and not self._is_held(page):
            self._queue.add(page)

    def _make_room(self, reason: str, *, all_or_nothing: bool = False) -> list[PageKey] | None:
        """Evicts until the bytes are within the limit. When they cannot be: as far as it goes, or not at all (None)."""
        victims: list[Page] = []
        self._policy.capacity = len(self)
        while self._limit is not None and self.bytes > self._limit:
            if not len(self._queue):
                if not all_or_nothing:
                    break
                for page in reversed(victims):
                    self._attach(page)
                    self._requeue(page)
                return None
            page = self._queue.pop(self._use)
            self._detach(page)
            victims.append(page)
        return self._evicted(victims, reason)

    def _remove(self, page: Page, reason: str) -> list[PageKey]:
        subtree = self._forest.subtree(page)
        for item in subtree:
            self._detach(item)
            if not item.stored:
                self._dropped.add(item.key)
        return self._evicted(subtree, reason)

    def _evicted(self, pages: list[Page], reason: str) -> list[PageKey]:
        for page in pages:
            self._policy.evicted(page)
            self.stats.evicted_bytes += page.nbytes
        if pages:
            self.stats.evicted_pages[reason] += len(pages)
            if self.listener is not None:
                self.listener.removed([page.key for page in pages if page.stored])
        return [page.key for page in pages]

    def _take_in(self, listed: Iterable[Stored], nbytes: int, use: Use | None) -> list[Stored]:
        """Adds what was listed; returns what has no head here, heads before tails."""
        orphans: list[Stored] = []
        added: list[Page] = []
        for item in sorted(listed, key=lambda item: item.key.depth):
            key, size, only_parts = item
            if key in self or key in self._dropped:
                continue
            size = nbytes if size is None else size
            page = None if only_parts else self._forest.place(key, size, stored=True)
            if page is None:
                orphans.append(item)
                continue
            self._attach(page)
            added.append(page)
        self._touch_in_order(added, use or self._use)
        if self.listener is not None:
            self.listener.stored([page.key for page in added])
        return orphans

    def _touch_in_order(self, pages: list[Page], use: Use) -> None:
        """First uses of listed pages: as remembered, what is not remembered last; then each takes its place."""
        remembered, self._remembered = self._remembered, {}
        last = len(remembered) * KEY_BYTES
        order = sorted(pages, key=lambda page: remembered.get(page.key.key, last)) if remembered else pages
        for place, page in enumerate(order):
            # Ticks before `use`, so that every use to come is later.
            tick = use.tick - len(order) + place if remembered else use.tick
            self._policy.touch(page, Use(tick, use.now))
        for page in pages:
            self._requeue(page)

    def _note(self, use: Use | None) -> None:
        if use is not None and use.tick >= self._use.tick:
            self._use = use
