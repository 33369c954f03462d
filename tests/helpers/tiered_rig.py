"""The rig of fake_executor with three tiers beneath the loop: the real tree, prefetcher, writer and disk index."""

from __future__ import annotations

from typing import Any

from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.store import Stored
from tierax.cache.writer import Writer
from tierax.engine.plan import Transfers
from tierax.engine.prefetch import Prefetcher
from tierax.engine.prefetch_policy import PrefetchPolicy
from tierax.engine.tier_transfers import TierTransfers

from .fake_executor import ManualClock, Rig
from .fake_mover import FakeMover, FakeStore

PAGE_BYTES = 1000


class TieredRig(Rig):
    """`store` outlives the rig: a second one on the same store is a restart."""

    def __init__(
        self,
        *,
        host_pages: int = 32,
        store: FakeStore | None = None,
        disk_pages: int | None = None,
        prefetch: str = "wait_complete",
        max_wait: float = 10.0,
        clock: ManualClock | None = None,
        disk: bool = True,
        **options: Any,
    ) -> None:
        self.store = store or FakeStore()
        self._disk = disk
        self._disk_pages = disk_pages
        self._prefetch = prefetch
        self._max_wait = max_wait
        super().__init__(host_pages=host_pages, clock=clock, identity={"model": "fake"}, **options)

    def transfers(self, given: Transfers | None) -> Transfers:
        self.mover = FakeMover(self.device, self.store, self.clock, page_bytes=PAGE_BYTES)
        self.index = None
        if self._disk:
            capacity = None if self._disk_pages is None else self._disk_pages * PAGE_BYTES
            self.index = DiskIndex(capacity)
            listed = [Stored(key, PAGE_BYTES) for key in self.store.pages]
            self.mover.delete(self.index.add_listed(listed))
        self.prefetcher = Prefetcher(
            self.cache,
            self.mover,
            self.index,
            page_bytes=PAGE_BYTES,
            policy=PrefetchPolicy.parse(self._prefetch),
            max_wait=self._max_wait,
        )
        self.writer = Writer(self.cache, self.mover, self.index, record_bytes=PAGE_BYTES)
        return TierTransfers(self.mover, self.prefetcher, self.writer, clock=self.clock)

    def step(self) -> bool:
        busy = super().step()
        self.check_disk()
        return busy

    def check_disk(self) -> None:
        """The store holds what the index says, no more than its capacity, heads before tails."""
        if self.index is None:
            return
        self.index.check()
        stored = {key for key in self.store.pages if self.index.is_stored(key)}
        assert len(stored) == sum(self.index.is_stored(key) for key in self.store.pages)
        if self._disk_pages is not None:
            assert len(self.store.pages) <= self._disk_pages
