"""Sends pages down: device to host by the write policy, and host to disk whatever enters the host.

A page on its way to the disk is held on the host until its write has been acknowledged. Writes in flight are bounded;
what exceeds the bound stays noted, and goes when there is room again, if it is still there then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .disk.index import DiskIndex
from .leases import Hold
from .manager import CacheManager
from .moves import Move, Mover, Outcome
from .page_keys import PageKey
from .radix_tree import HOST, Node

logger = logging.getLogger(__name__)

PAUSE = 5.0
"""Seconds without writes after one has failed: a full or broken disk is not asked again for every page."""
LOOK_EVERY = 2.0
"""Seconds between looks at the free space of the disk's file system."""
MOST_NOTED = 65_536
"""Nodes that may wait for a write; beyond them the oldest are forgotten."""


@dataclass(slots=True)
class WriterStats:
    """Counters since the start; they only grow."""

    saved_pages: int = 0
    """Device to host."""
    save_failures: int = 0
    written_pages: int = 0
    """Host to disk, acknowledged."""
    failed_pages: dict[str, int] = field(default_factory=dict)
    """Writes that failed, by outcome."""
    failed_deletes: int = 0
    """Deletes that failed; they are tried again."""
    paused: int = 0
    """Times that writing paused after a failure."""


@dataclass(slots=True, eq=False)
class _Write:
    keys: list[PageKey]
    hold: Hold
    open: set[int]


class Writer:
    """The downward half of the transfers. `index` is None without a disk."""

    def __init__(
        self,
        cache: CacheManager,
        mover: Mover,
        index: DiskIndex | None,
        *,
        record_bytes: int,
        max_bytes_in_flight: int = 256 << 20,
        free_bytes: Callable[[], int | None] = lambda: None,
        free_floor: int = 0,
    ) -> None:
        """`record_bytes`: a page on the disk, header included. `free_floor`: bytes of the file system that stay free."""
        self.stats = WriterStats()
        self._cache = cache
        self._mover = mover
        self._index = index
        self._record_bytes = record_bytes
        # Half of the host stays for others, however slow the disk is.
        self._most_pages = max(min(max_bytes_in_flight // record_bytes, cache.host.num_pages // 2), 1)
        self._free_bytes = free_bytes
        self._free_floor = free_floor
        self._saves: dict[Move, list[int]] = {}
        self._writes: dict[Move, _Write] = {}
        self._pages_in_flight = 0
        self._crowded = False
        """The bound was reached, and half of it is not free again: what is begun in small pieces is walked too often."""
        self._undeleted: dict[PageKey, None] = {}
        """Pages that left the index, but not the store. Nothing is written while there are any: the disk may be full."""
        self._unfilled: set[int] = set()
        """Host rows in the tree that a failed save has not reached."""
        self._paused_until = float("-inf")
        self._out_of_order = False
        """Something has failed since the last page that was written."""
        self._look_again_at = float("-inf")
        if index is not None:
            cache.tiers.unwritten = {}

    def busy(self, now: float) -> bool:
        owed = (self._cache.tiers.unwritten or self._undeleted) and now >= self._paused_until
        return bool(self._saves or self._writes or self._cache.tiers.saves or owed)

    def save_evicted(self) -> None:
        """Orders the copies that are owed, before a step overwrites their sources."""
        pages, rows = self._cache.take_saves()
        if rows:
            self._saves[self._mover.save(pages, rows)] = rows

    def push(self, now: float) -> None:
        """Saves what the write policy wants on the host, and writes what the disk has not."""
        tiers = self._cache.tiers
        if self._unfilled:
            tiers.drop_rows(self._unfilled)
        for node in list(tiers.unsaved):
            # Making room for one may have taken another out.
            if node in tiers.unsaved:
                # A path that is longer than the host is never there as a whole: nobody waits for that.
                if not tiers.save(node) and node.end <= self._cache.host.num_pages:
                    break
                tiers.unsaved.pop(node, None)
        self.save_evicted()
        if self._index is not None:
            if expired := self._index.expire(now):
                self._mover.delete(expired)
            self._delete_again(now)
            self._write_noted(now)

    def observe_save(self, move: Move) -> None:
        rows = self._saves.pop(move, None)
        if rows is None or not move.done:
            return
        bad = {row for row, outcome in zip(rows, move.outcomes, strict=True) if outcome is not Outcome.OK}
        self.stats.saved_pages += len(rows) - len(bad)
        self.stats.save_failures += len(bad)
        self._unfilled |= bad

    def observe_write(self, move: Move, now: float) -> None:
        """Takes the news of a write: every page once."""
        assert self._index is not None
        write = self._writes[move]
        failed: Outcome | None = None
        for at in list(write.open):
            outcome = move.outcomes[at]
            if outcome is None:
                continue
            write.open.discard(at)
            self._pages_in_flight -= 1
            if outcome is Outcome.OK:
                self._index.stored(write.keys[at])
                self.stats.written_pages += 1
                self._out_of_order = False
            else:
                failed = outcome
                self._mover.delete(self._index.failed(write.keys[at]))
                self.stats.failed_pages[outcome.value] = self.stats.failed_pages.get(outcome.value, 0) + 1
        if failed is not None:
            self._complain(f"a page could not be written: {failed.value}")
            self._pause(now)
            self._note_again(write.hold)
        if not write.open:
            del self._writes[move]
            if write.hold.node is not None:
                self._cache.drop(write.hold, leased=True)

    def reset(self) -> None:
        """The device was lost, and with it every hold. Writes that are under way are still seen to their end."""
        self._saves.clear()
        self._unfilled.clear()

    def delete(self, keys: list[PageKey]) -> None:
        """Deletes what has left the index; nothing, where the disk is only read."""
        if self._index is not None:
            self._mover.delete(keys)

    def _delete_again(self, now: float) -> None:
        assert self._index is not None
        if failed := self._mover.take_undeleted():
            self._complain(
                f"{len(failed)} pages could not be deleted; nothing is written until they are gone"
            )
            self.stats.failed_deletes += len(failed)
            self._undeleted.update(dict.fromkeys(failed))
            self._pause(now)
        elif self._undeleted and now >= self._paused_until:
            # What the index has again was, or is being, written over.
            self._mover.delete([key for key in self._undeleted if key not in self._index])
            self._undeleted.clear()
            # Before anything is written it must be known whether that worked.
            self._paused_until = now + PAUSE

    def _write_noted(self, now: float) -> None:
        noted = self._cache.tiers.unwritten
        assert noted is not None
        while len(noted) > MOST_NOTED:
            del noted[next(iter(noted))]
        if now < self._paused_until or not noted or not self._has_space(now):
            return
        if self._crowded and self._pages_in_flight > self._most_pages // 2:
            return
        self._crowded = False
        for node in list(noted):
            if self._pages_in_flight >= self._most_pages:
                self._crowded = True
                break
            if node in noted:
                used = noted.pop(node)
                if not self._write(node, used=used):
                    noted[node] = False

    def _write(self, node: Node, *, used: bool) -> bool:
        """Writes what the disk lacks of a path and the host has, heads first; False if some of it has to wait.

        `used`: a request has used it, so what is stored already counts as used.
        """
        index = self._index
        assert index is not None
        path = node.path()[1:]
        use = self._cache.tiers.use()
        if used:
            index.touch([key for step in path for key in step.names(0, step.size)], use)
        known = self._known_pages(path)
        on_host = sum(len(step.runs[HOST].pages) for step in path)
        wanted: list[PageKey] = []
        complete = True
        for key in _names_between(path, known, on_host):
            if self._pages_in_flight + len(wanted) >= self._most_pages:
                complete = False
                break
            victims = index.reserve(key, self._record_bytes, use)
            if victims is None:
                break
            self._mover.delete(victims)
            wanted.append(key)
        if wanted:
            hold = self._cache.hold_down_to(node)
            rows = self._cache.rows(hold, known, known + len(wanted))
            move = self._mover.write(wanted, rows)
            self._writes[move] = _Write(wanted, hold, set(range(len(wanted))))
            self._pages_in_flight += len(wanted)
        return complete

    def _known_pages(self, path: Sequence[Node]) -> int:
        """Leading pages of a path that the disk has, or is being given. No page is there without its heads, so this looks
        from the end: an answer that grows page by page is not walked from its start each time."""
        assert self._index is not None
        for step in reversed(path):
            keys = step.names(0, step.size)
            if keys[0] in self._index:
                return step.start + next(
                    (i for i, key in enumerate(keys) if key not in self._index), step.size
                )
        return 0

    def _has_space(self, now: float) -> bool:
        """Looks at the file system now and then: what was deleted must be free before the next look."""
        assert self._index is not None
        if now < self._look_again_at:
            return True
        self._look_again_at = now + LOOK_EVERY
        free = self._free_bytes()
        if free is None:
            return True
        self._mover.delete(self._index.keep_free(free, self._free_floor))
        if free >= self._free_floor:
            return True
        self._pause(now)
        return False

    def _complain(self, problem: str) -> None:
        """Once, until something has been written again."""
        if not self._out_of_order:
            logger.warning("disk cache: %s; it is tried again every %g s", problem, PAUSE)
        self._out_of_order = True

    def _pause(self, now: float) -> None:
        self.stats.paused += 1
        self._paused_until = now + PAUSE

    def _note_again(self, hold: Hold) -> None:
        noted = self._cache.tiers.unwritten
        if hold.node is not None and hold.node.parent is not None and noted is not None:
            noted[hold.node] = False


def _names_between(path: Sequence[Node], first: int, last: int) -> Iterator[PageKey]:
    """Of the pages `[first, last)` of a path."""
    for step in path:
        if step.end > first and step.start < last:
            yield from step.names(max(first - step.start, 0), min(last, step.end) - step.start)
