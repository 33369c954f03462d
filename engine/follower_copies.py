"""The tiers below the device in a process that follows process 0: its heads' rows on the host, and their records.

What goes where is said by commands, in an order that is the same everywhere; a mover like process 0's carries them out.
What the disk has done is told to process 0, which takes a page for there when every process has said so.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from ..cache.device_pool import DevicePool
from ..cache.disk.share import Share
from ..cache.disk.store import PageStore
from ..cache.disk.team import MemberRecords, page_key
from ..cache.host_pool import HostPool
from ..cache.mover import TierMover
from ..cache.moves import Move
from .channel import Connection

COPIES = frozenset({"save", "load", "read", "pack", "store", "drop", "look"})
"""Commands that are methods here; the last one we give ourselves."""
NAP = 0.01
"""Seconds between looks for a copy that is waited for, at most."""
CLOSE_TIMEOUT = 2.0
"""Seconds in which what the disk is doing is to end; process 0 has waited for all that matters."""


class MemberDisk(NamedTuple):
    store: PageStore
    share: Share


class FollowerCopies:
    """Owns the mover, and the store of `disk`."""

    def __init__(self, pool: DevicePool, rows: int, disk: MemberDisk | None, leader: Connection) -> None:
        self._leader = leader
        self._store = None if disk is None else disk.store
        self._records = None if disk is None else MemberRecords(*disk)
        self._news = threading.Event()
        host = HostPool(rows, pool.page_bytes)
        self._mover = TierMover(pool, host, clock=time.monotonic, records=self._records, wake=self._wake)
        self._numbers: dict[Move, int] = {}
        """What process 0 calls the movements of the disk."""

    def save(self, pages: list[int], rows: list[int]) -> None:
        self._mover.save(pages, rows)

    def load(self, rows: list[int], pages: list[int]) -> None:
        """Waits until the pages are on their way to the device: the next command may use them."""
        move = self._mover.load(rows, pages)
        while not move.done:
            self._news.clear()
            self.look()
            if not move.done:
                self._news.wait(NAP)

    def read(self, number: int, key: list[bytes], row: int) -> None:
        self._numbers[self._mover.read([page_key(key)], [row])] = number

    def pack(self, number: int, key: list[bytes], row: int) -> None:
        """Makes the record of a row as it is now, and keeps it until `store` or `drop`."""
        assert self._records is not None, "a write without a disk"
        self._records.order(number, page_key(key))
        self._numbers[self._mover.write([page_key(key)], [row])] = number

    def store(self, number: int) -> None:
        assert self._records is not None, "a write without a disk"
        self._records.decide(number, store=True)

    def drop(self, number: int) -> None:
        assert self._records is not None, "a write without a disk"
        self._records.decide(number, store=False)

    def look(self) -> None:
        """Sees what has ended, and tells process 0 of what concerns the disk. Raises RuntimeError for a copy between host and
        device that has failed: process 0 goes on as if this one had made it."""
        for move in self._mover.poll(time.monotonic()):
            if not move.done:
                continue
            if (number := self._numbers.pop(move, None)) is not None:
                (outcome,) = move.outcomes
                assert outcome is not None
                self._leader.send(number, outcome.value)
            elif move.good < move.pages:
                raise RuntimeError(f"{move.pages} pages could not be copied ({move.kind})")

    def close(self) -> None:
        self._mover.close(CLOSE_TIMEOUT)
        if self._store is not None:
            self._store.close(CLOSE_TIMEOUT)

    def _wake(self) -> None:
        self._news.set()
        self._leader.put("look")
