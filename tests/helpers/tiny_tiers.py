"""The tiers below a tiny real device: host rows, a page store in a directory, and the threads that move pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierax.cache.device_pool import DevicePool
from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.page_records import PageRecords
from tierax.cache.disk.record import PageLayout
from tierax.cache.disk.share import Share
from tierax.cache.disk.store import PageStore
from tierax.cache.host_pool import HostPool
from tierax.cache.manager import CacheManager
from tierax.cache.mover import TierMover
from tierax.cache.writer import Writer
from tierax.engine.prefetch import Prefetcher
from tierax.engine.prefetch_policy import PrefetchPolicy
from tierax.engine.tier_transfers import TierTransfers


class TinyTiers:
    """Tiers under one loop. `close` is the end of a process: a later one on the same directory is a restart."""

    def __init__(
        self,
        cache: CacheManager,
        pool: DevicePool,
        clock: Callable[[], float],
        *,
        directory: Path | None,
        disk_pages: int | None = None,
        prefetch: str = "wait_complete",
        max_wait: float = 10.0,
        free_floor: int | None = None,
        wrap_store: Callable[[Any], Any] = lambda store: store,
    ) -> None:
        layout = PageLayout((pool.page_bytes,), "uint8")
        self.store = None if directory is None else wrap_store(PageStore(directory))
        self.index = None
        if self.store is not None:
            self.index = DiskIndex(None if disk_pages is None else disk_pages * layout.record_bytes)
            for key in self.index.add_listed(list(self.store.list()), layout.record_bytes):
                self.store.delete(key, lambda outcome: None)
        self.host = HostPool(cache.host.num_pages, pool.page_bytes)
        self.mover = TierMover(
            pool,
            self.host,
            clock=clock,
            records=None if self.store is None else PageRecords(self.store, Share.whole(layout)),
        )
        self.prefetcher = Prefetcher(
            cache,
            self.mover,
            self.index,
            page_bytes=pool.page_bytes,
            policy=PrefetchPolicy.parse(prefetch),
            max_wait=max_wait,
        )
        floor: dict[str, Any] = {}
        if self.store is not None and free_floor is not None:
            floor = {"free_bytes": self.store.free_bytes, "free_floor": free_floor}
        self.record_bytes = layout.record_bytes
        self.writer = Writer(cache, self.mover, self.index, record_bytes=layout.record_bytes, **floor)
        self.transfers = TierTransfers(self.mover, self.prefetcher, self.writer, clock=clock)

    def close(self) -> None:
        self.mover.close(10.0)
        if self.store is not None:
            self.store.close(10.0)
