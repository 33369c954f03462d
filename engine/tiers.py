"""Puts the tiers below the device together from a config: host pool, page store, mover, and who drives them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.device_pool import DevicePool
from ..cache.disk.fleet_thread import FleetThread
from ..cache.disk.index import DiskIndex
from ..cache.disk.page import Listing
from ..cache.disk.page_records import PageRecords
from ..cache.disk.probe import Prober
from ..cache.disk.relist import Relist
from ..cache.disk.share import Share
from ..cache.disk.store import PageStore
from ..cache.disk.team import TeamRecords
from ..cache.host_pool import HostPool
from ..cache.manager import CacheManager
from ..cache.mover import TierMover
from ..cache.writer import Writer
from ..models.source import ModelSource
from .config import ConfigError, EngineConfig, parse_size
from .disk_tier import open_disk, open_disk_of_all
from .leader import Leader
from .platform import Platform, host_memory
from .prefetch import Prefetcher
from .prefetch_policy import PrefetchPolicy
from .tier_transfers import TierTransfers

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 2
"""Part of every page's key: raised when the meaning of a page's bytes changes, or what is computed for them (2: rotary frequencies
that are the same on every processor)."""
STAGING_BYTES = 256 << 20
"""Host memory through which the disk is read and written where no host cache is wanted, at most."""
HOST_SHARE = 0.5
"""Part of the available host memory that the host pool takes at most, where the config leaves its size to us."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """What lies below the device, and its owner: `close` ends its threads."""

    host: HostPool
    store: PageStore | None
    index: DiskIndex | None
    mover: TierMover
    transfers: TierTransfers
    relist: Relist[Listing] | None
    fleet: FleetThread | None = None
    """Keeps in touch with the other processes that write to the store."""

    def close(self, timeout: float = 10.0) -> None:
        """Lets writes end within `timeout` seconds, and keeps the disk's order of use for the next start."""
        if self.relist is not None:
            self.relist.close()
        drained = self.mover.close(timeout)
        if self.fleet is not None:
            self.fleet.close()
        if not drained:
            logger.warning("some pages were not written to the disk cache within %g s", timeout)
        if self.store is not None and self.index is not None:
            # A disk that has not ended its writes by now gets no second time for them.
            self.store.papers.save_index(
                self.index.snapshot(), patience=max(timeout, 1.0) if drained else 1.0
            )
            self.store.close(timeout if drained else 0.0)


def host_pages(config: EngineConfig, platform: Platform, pool: DevicePool, context_pages: int) -> int:
    """Rows of the host pool, of one copy of the model. Raises `ConfigError` when they do not fit into the memory that is available."""
    page_bytes, device_bytes = pool.page_bytes, pool.shape.pages * pool.page_bytes
    _, available = host_memory()
    copies = config.dp_size
    disk = config.host_disk_cache_dir is not None
    if config.disable_radix_cache:
        return 0
    wanted = config.host_cache_bytes(available, device_bytes)
    if wanted is None:
        if platform.host_times <= 1 and not disk:
            # Device memory is host memory here: a larger device pool does the same at no cost.
            return 0
        wanted = min(int(device_bytes * platform.host_times), int(available * HOST_SHARE) // copies)
    elif wanted * copies > available:
        raise ConfigError(
            f"host_cache_size: {wanted * copies} bytes are asked for, but only {available} are available beside the device cache"
        )
    pages = wanted // page_bytes
    if disk and pages < 2:
        return max(min(STAGING_BYTES // page_bytes, context_pages), 2)
    return pages


def identity(
    source: ModelSource,
    config: EngineConfig,
    dtype: str,
    weight_form: str,
    activations: str,
    kv_dtype: str,
    page_size: int,
) -> dict[str, Any]:
    """All that a KV value depends on besides tokens and tenant."""
    return {
        "weights": source.weights_digest() if config.host_disk_cache_dir is not None else "",
        "model": repr(source.config),
        "dtype": dtype,
        "quantization": weight_form,
        "activations": activations,
        "kv_dtype": kv_dtype,
        "page_size": page_size,
        "layout": LAYOUT_VERSION,
    }


def build_tiers(
    config: EngineConfig,
    cache: CacheManager,
    pool: DevicePool,
    fields: dict[str, Any],
    *,
    share: Share,
    clock: Callable[[], float],
    wrap_store: Callable[[Any], Any] = lambda store: store,
    leader: Leader | None = None,
) -> Tiers:
    """The tiers below `pool`. `fields` is the cache's identity; `share` what a host row has of a page. `wrap_store` may put
    something before the page store. `leader`: with several processes, tells the others of the host pool and of all that is
    copied to and from it.

    Raises `ConfigError` when the disk cache cannot be used.
    """
    host = HostPool(cache.host.num_pages, pool.page_bytes)
    disk = None
    if config.host_disk_cache_dir is not None and cache.enabled:
        disk = open_disk(config, share.record_bytes, fields, cache.tiers.use, clock=clock)
    store = None if disk is None else wrap_store(disk.store)
    index = None if disk is None else disk.index
    announce = _tell_nobody if leader is None else leader.announce
    records = team = None
    if store is not None and leader is not None:
        try:
            open_disk_of_all(store, leader)
        except ConfigError:
            if disk is not None and disk.fleet is not None:
                disk.fleet.close()
            raise
        records = team = TeamRecords(store, share, leader.others, announce)
        leader.listen(team.heard)
    elif store is not None:
        records = PageRecords(store, share)
    announce("host", host.num_rows)

    def ordered(kind: str, sources: Sequence[Any], targets: Sequence[int]) -> None:
        if kind != "write":
            announce(kind, list(sources), list(targets))
        elif team is not None:
            for key, row in zip(sources, targets, strict=True):
                team.order(key, row)

    mover = TierMover(pool, host, clock=clock, records=records, ordered=ordered)
    record_bytes = share.record_bytes
    writer = Writer(
        cache,
        mover,
        index if store is not None and not store.read_only else None,
        record_bytes=record_bytes,
        free_bytes=store.free_bytes if store is not None else lambda: None,
        free_floor=parse_size(config.disk_free_space),
    )
    prober = None
    if store is not None and config.disk_cache_shared:
        prober = Prober(store, record_bytes=record_bytes, clock=clock)
    prefetcher = Prefetcher(
        cache,
        mover,
        index,
        page_bytes=pool.page_bytes,
        policy=PrefetchPolicy.parse(config.prefetch_policy),
        max_wait=config.prefetch_max_wait,
        on_arrival=not config.disable_prefetch,
        prober=prober,
    )
    relist = None
    if store is not None and index is not None and config.disk_cache_refresh > 0:
        relist = Relist(lambda: index.compare(list(store.list())), config.disk_cache_refresh, clock=clock)
    fleet = None if disk is None else disk.fleet

    def look_around() -> None:
        if fleet is not None:
            fleet.turn()
        if relist is not None and index is not None and (listing := relist.take()) is not None:
            mover.delete(index.take_listing(listing, record_bytes, cache.tiers.use()))

    transfers = TierTransfers(mover, prefetcher, writer, look_around, clock=clock)
    return Tiers(host, store, index, mover, transfers, relist, fleet)


def _tell_nobody(command: str, *arguments: Any) -> None:
    """What a single process says of its commands."""
