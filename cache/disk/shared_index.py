"""An index of a store to which other processes write as well: it evicts nothing by itself, and says what it needs.

What leaves the store is agreed upon (fleet.py). Until then such a page is *doomed*: it is in the store still, but is no
hit any more, and is not written.

    stored --doomed--> in the store, but nobody's --deleted--> absent
                                  '----------------spared----> found again by a listing, or as others use it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..page_keys import PageKey
from ..policies.policy import EvictionPolicy, Use
from .index import DiskIndex
from .names import Stored
from .page import Listing, Page


class SharedIndex(DiskIndex):
    """Methods that would return what to delete return nothing, but for `clear`, which somebody has asked for.

    `capacity` bounds what this process adds; it counts what all have written, as far as it is known here.
    """

    def __init__(self, capacity: int | None, policy: EvictionPolicy | None = None) -> None:
        super().__init__(capacity, policy)
        self.sizes: dict[bytes, int] = {}
        """Bytes of a record by namespace, as others tell, for stores that do not."""
        self._orphans: dict[PageKey, tuple[float, int]] = {}
        """Without a head in the store: since when they were found so, and bytes. Their heads may be on their way."""
        self._orphan_bytes = 0
        self._doomed: dict[PageKey, int] = {}
        """Bytes of each, as far as they are known."""
        self._doomed_bytes = 0
        self._absent: frozenset[PageKey] = frozenset()
        """Were not in the latest listing."""
        self._used: dict[PageKey, None] = {}

    @property
    def total_bytes(self) -> int:
        """Of all that is in the store, what is doomed included."""
        return self.bytes + self._orphan_bytes + self._doomed_bytes

    @property
    def limit(self) -> int | None:
        """Bytes that the store may take at present; None: no bound."""
        return self._limit

    @property
    def doomed(self) -> frozenset[PageKey]:
        return frozenset(self._doomed)

    # Use: what others must not delete.

    def take_used(self) -> list[PageKey]:
        """What was used since the last call, in order of use; and what is in use for longer."""
        used, self._used = self._used, {}
        locked = (self._forest.named(name) for name in self._locks)
        used.update((page.key, None) for page in locked if page is not None)
        return list(used)

    def keep(self, keys: Iterable[PageKey]) -> None:
        """Somebody is about to read these pages."""
        for key in keys:
            self._used.pop(key, None)
            self._used[key] = None

    def touch(self, keys: Iterable[PageKey], use: Use) -> None:
        keys = list(keys)
        self.keep(keys)
        super().touch(keys, use)

    def lock(self, keys: Iterable[PageKey]) -> None:
        keys = list(keys)
        self.keep(keys)
        super().lock(keys)

    def heard(self, keys: Iterable[PageKey], use: Use) -> None:
        """Others have used these pages."""
        super().touch(keys, use)

    # Writing.

    def reserve(self, key: PageKey, nbytes: int, use: Use | None = None) -> list[PageKey] | None:
        """As for `DiskIndex`, but makes no room: None if there is none, and for a page that is doomed."""
        if key in self:
            return []
        full = self._limit is not None and self.total_bytes + nbytes > self._limit
        if full or key in self._doomed:
            self.stats.refused_pages += 1
            return None
        answer = super().reserve(key, nbytes, use)
        if answer is not None:
            self.keep([key])
        return answer

    def failed(self, key: PageKey) -> list[PageKey]:
        super().failed(key)
        return []

    # Leaving.

    def remove(self, key: PageKey, reason: str) -> list[PageKey]:
        """Forgets a page that proved bad or absent, and all that hangs below it. Who computes it again writes over it."""
        super().remove(key, reason)
        return []

    def expire(self, now: float) -> list[PageKey]:
        return []

    def choose(
        self, goal: int, now: float, *, most: int, spare: Callable[[PageKey], bool], orphan_age: float
    ) -> list[PageKey]:
        """Dooms what should leave the store, tails before heads, at most `most` pages, and returns it: orphans that have
        been that for `orphan_age` seconds, what its policy keeps no longer, and what is beyond `goal` bytes in all.

        `spare` says which pages must stay.
        """
        victims = self._doom_orphans(now - orphan_age, most, spare)
        spared: list[Page] = []
        while len(victims) < most and (page := self._queue.expired(now)) is not None:
            self._doom_or_spare(page, "ttl", spare, victims, spared)
        while len(victims) < most and len(self._queue) and self.bytes + self._orphan_bytes > goal:
            self._doom_or_spare(self._queue.pop(self._use), "capacity", spare, victims, spared)
        for page in spared:
            self._requeue(page)
        return victims

    def doom(self, keys: Sequence[PageKey], spare: Callable[[PageKey], bool]) -> list[PageKey]:
        """Told that somebody wants to delete these pages, tails first, dooms them and returns those that must stay: what
        `spare` says, what is in use, and the heads of such."""
        needed = []
        for key in keys:
            page = self._forest.find(key)
            if page is None:
                self._enter_doomed(key, 0)
            elif spare(key) or self._is_held(page) or page.children:
                needed.append(key)
            else:
                self._detach(page)
                self._policy.evicted(page)
                if self.listener is not None:
                    self.listener.removed([key])
                self._enter_doomed(key, page.nbytes)
        return needed

    def end_doom(self, keys: Iterable[PageKey]) -> None:
        """These pages have been deleted, or spared; a listing tells."""
        for key in keys:
            self._doomed_bytes -= self._doomed.pop(key, 0)

    def _doom_or_spare(
        self,
        page: Page,
        reason: str,
        spare: Callable[[PageKey], bool],
        victims: list[PageKey],
        spared: list[Page],
    ) -> None:
        if spare(page.key):
            spared.append(page)
            return
        self._detach(page)
        self._evicted([page], reason)
        self._enter_doomed(page.key, page.nbytes)
        victims.append(page.key)

    def _doom_orphans(self, before: float, most: int, spare: Callable[[PageKey], bool]) -> list[PageKey]:
        old = [key for key, (since, _) in self._orphans.items() if since <= before and not spare(key)]
        victims = sorted(old, key=lambda key: -key.depth)[:most]
        for key in victims:
            _, nbytes = self._orphans.pop(key)
            self._orphan_bytes -= nbytes
            self._enter_doomed(key, nbytes)
        self.stats.evicted_pages["orphan"] += len(victims)
        return victims

    def _enter_doomed(self, key: PageKey, nbytes: int) -> None:
        if key not in self._doomed:
            self._doomed[key] = nbytes
            self._doomed_bytes += nbytes

    # What others have stored.

    def add_listed(
        self,
        listed: Iterable[Stored],
        nbytes: int = 0,
        use: Use | None = None,
        *,
        spare_orphans: bool = True,
    ) -> list[PageKey]:
        """Takes in some pages that the store was found to hold; what has no head here is passed over."""
        self._note(use)
        self._take_in(self._sized(listed, nbytes), nbytes, use)
        return []

    def take_listing(self, listing: Listing, nbytes: int, use: Use) -> list[PageKey]:
        """What two lists in turn lack is there no more: one may have been begun before the page was stored."""
        self._note(use)
        orphans = self._take_in(self._sized(listing.unknown, nbytes), nbytes, use)
        known, self._orphans = self._orphans, {}
        for page in orphans:
            since, _ = known.get(page.key, (use.now, 0))
            self._orphans[page.key] = since, self._size(page, nbytes)
        self._orphan_bytes = sum(size for _, size in self._orphans.values())
        for key in listing.absent & self._absent:
            if self.is_stored(key):
                self.remove(key, "missing")
        self._absent = listing.absent - self._absent
        return []

    def check(self) -> None:
        super().check()
        assert not any(key in self for key in self._doomed), "a doomed page is a hit"

    def _check_capacity(self) -> None:
        """Others may have written more than there is room for."""

    def _sized(self, listed: Iterable[Stored], nbytes: int) -> list[Stored]:
        known = self._doomed
        return [page._replace(nbytes=self._size(page, nbytes)) for page in listed if page.key not in known]

    def _size(self, page: Stored, nbytes: int) -> int:
        return self.sizes.get(page.key.namespace, nbytes) if page.nbytes is None else page.nbytes

    def _make_room(self, reason: str, *, all_or_nothing: bool = False) -> list[PageKey]:
        """Not by itself."""
        return []
