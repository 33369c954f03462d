"""Puts the tiers below the device together from a config: host pool, page store, mover, and who drives them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..cache.device_pool import DevicePool
from ..cache.disk.index import DiskIndex
from ..cache.disk.record import PageLayout
from ..cache.disk.relist import Relist
from ..cache.disk.store import PageStore, StoreError
from ..cache.host_pool import HostPool
from ..cache.malloc import keep_freed_memory
from ..cache.manager import CacheManager
from ..cache.mover import TierMover
from ..cache.page_keys import namespace_digest
from ..cache.policies.registry import Use
from ..cache.writer import Writer
from ..models.source import ModelSource
from .config import ConfigError, EngineConfig, parse_size
from .platform import Platform, host_memory
from .prefetch import Prefetcher
from .prefetch_policy import PrefetchPolicy
from .tier_transfers import TierTransfers

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
"""Part of every page's key: raised when the meaning of a page's bytes changes."""
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
    relist: Relist | None

    def close(self, timeout: float = 10.0) -> None:
        """Lets writes end within `timeout` seconds, and keeps the disk's order of use for the next start."""
        if self.relist is not None:
            self.relist.close()
        drained = self.mover.close(timeout)
        if not drained:
            logger.warning("some pages were not written to the disk cache within %g s", timeout)
        if self.store is not None and self.index is not None:
            # A disk that has not ended its writes by now gets no second time for them.
            self.store.save_index(self.index.snapshot(), patience=max(timeout, 1.0) if drained else 1.0)
            self.store.close(timeout if drained else 0.0)


def host_pages(config: EngineConfig, platform: Platform, pool: DevicePool, context_pages: int) -> int:
    """Rows of the host pool. Raises `ConfigError` when they do not fit into the memory that is available."""
    page_bytes, device_bytes = pool.page_bytes, pool.shape.pages * pool.page_bytes
    _, available = host_memory()
    disk = config.host_disk_cache_dir is not None
    if config.disable_radix_cache:
        return 0
    wanted = config.host_cache_bytes(available, device_bytes)
    if wanted is None:
        if platform.host_times <= 1 and not disk:
            # Device memory is host memory here: a larger device pool does the same at no cost.
            return 0
        wanted = min(int(device_bytes * platform.host_times), int(available * HOST_SHARE))
    elif wanted > available:
        raise ConfigError(
            f"host_cache_size: {wanted} bytes are asked for, but only {available} are available beside the device cache"
        )
    pages = wanted // page_bytes
    if disk and pages < 2:
        return max(min(STAGING_BYTES // page_bytes, context_pages), 2)
    return pages


def identity(
    source: ModelSource, config: EngineConfig, dtype: str, activations: str, kv_dtype: str, page_size: int
) -> dict[str, Any]:
    """All that a KV value depends on besides tokens and tenant."""
    return {
        "weights": source.weights_digest() if config.host_disk_cache_dir is not None else "",
        "model": repr(source.config),
        "dtype": dtype,
        "quantization": config.quantization,
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
    clock: Callable[[], float],
    wrap_store: Callable[[Any], Any] = lambda store: store,
) -> Tiers:
    """The tiers below `pool`. `fields` is the cache's identity. `wrap_store` may put something before the page store.

    Raises `ConfigError` when the disk cache cannot be used.
    """
    host = HostPool(cache.host.num_pages, pool.page_bytes)
    store = index = layout = None
    if config.host_disk_cache_dir is not None and cache.enabled:
        layout = _layout(pool)
        store, index = _open_disk(config, layout, fields, clock)
        store = wrap_store(store)
    mover = TierMover(pool, host, clock=clock, store=store, layout=layout)
    record_bytes = layout.record_bytes if layout is not None else pool.page_bytes
    writer = Writer(
        cache,
        mover,
        index if store is not None and not store.read_only else None,
        record_bytes=record_bytes,
        free_bytes=store.free_bytes if store is not None else lambda: None,
        free_floor=parse_size(config.disk_free_space),
    )
    prefetcher = Prefetcher(
        cache,
        mover,
        index,
        page_bytes=pool.page_bytes,
        policy=PrefetchPolicy.parse(config.prefetch_policy),
        max_wait=config.prefetch_max_wait,
        on_arrival=not config.disable_prefetch,
    )
    relist = None
    if store is not None and config.disk_cache_refresh > 0:
        relist = Relist(lambda: list(store.list()), config.disk_cache_refresh, clock=clock)

    def look_around() -> None:
        if relist is not None and index is not None and (listed := relist.take()) is not None:
            mover.delete(index.add_listed(listed, record_bytes, cache.tiers.use(), spare_orphans=True))

    transfers = TierTransfers(mover, prefetcher, writer, look_around, clock=clock)
    return Tiers(host, store, index, mover, transfers, relist)


def _layout(pool: DevicePool) -> PageLayout:
    shape = pool.shape
    if shape.quantized:
        return PageLayout((pool.page_bytes,), "uint8")
    return PageLayout((shape.layers, shape.page_size, shape.kv_heads, 2 * shape.head_dim), pool.dtype.name)


def _open_disk(
    config: EngineConfig, layout: PageLayout, fields: dict[str, Any], clock: Callable[[], float]
) -> tuple[PageStore, DiskIndex]:
    """The store, and an index of what is in it already."""
    assert config.host_disk_cache_dir is not None
    started = clock()
    keep_freed_memory()
    try:
        store = PageStore(config.host_disk_cache_dir, read_only=config.disk_cache_read_only)
        index = DiskIndex(
            None if store.read_only else parse_size(config.disk_cache_size),
            config.make_eviction_policy("disk"),
        )
        index.restore(store.load_index())
        surplus = index.add_listed(store.list(), layout.record_bytes, Use(0, clock()))
        if store.local is not None:
            for key in _counted(surplus):
                store.delete(key, lambda outcome: None)
        store.describe(namespace_digest(fields), fields | {"model_name": config.model_name})
    except StoreError as error:
        raise ConfigError(f"host_disk_cache_dir: {error}") from error
    logger.info(
        "disk cache %s: %d pages, %.2f GB, listed in %.1f s",
        store.url,
        len(index),
        index.bytes / 1e9,
        clock() - started,
    )
    return store, index


def _counted(surplus: list[Any]) -> Iterator[Any]:
    if surplus:
        logger.info("disk cache: %d pages without a head or beyond its size are removed", len(surplus))
    yield from surplus
