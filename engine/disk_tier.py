"""Opens the disk tier: a page store, an index of what is in it already, and the other processes that write there."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..cache.disk.board import Board
from ..cache.disk.fleet import TURNS_PER_LEASE, Fleet
from ..cache.disk.fleet_thread import FleetThread
from ..cache.disk.index import DiskIndex
from ..cache.disk.names import REPLICA_BYTES
from ..cache.disk.shared_index import SharedIndex
from ..cache.disk.store import PageStore, StoreError
from ..cache.malloc import keep_freed_memory
from ..cache.page_keys import PageKey, namespace_digest
from ..cache.policies.registry import Use
from .config import ConfigError, EngineConfig, parse_size
from .leader import Leader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskTier:
    store: PageStore
    index: DiskIndex
    fleet: FleetThread | None
    """Where other processes write to the same store, unless this one only reads."""


def open_disk(
    config: EngineConfig,
    record_bytes: int,
    fields: Mapping[str, str | int | float | bytes | None],
    use: Callable[[], Use],
    *,
    clock: Callable[[], float],
) -> DiskTier:
    """What `config` says. `fields` is the cache's identity; `use` the next moment. Raises `ConfigError` when the place cannot
    be used."""
    assert config.host_disk_cache_dir is not None
    started = clock()
    keep_freed_memory()
    fleet = None
    try:
        store = PageStore(config.host_disk_cache_dir, read_only=config.disk_cache_read_only)
        capacity = None if store.read_only else parse_size(config.disk_cache_size)
        policy = config.make_eviction_policy("disk")
        if config.disk_cache_shared:
            index = SharedIndex(capacity, policy)
            if not store.read_only:
                fleet = _join(store, index, record_bytes, config.disk_cache_lease, use, clock)
        else:
            index = DiskIndex(capacity, policy)
        index.restore(store.papers.load_index())
        listed = list(store.list())
        if config.disk_cache_shared:
            index.take_listing(index.compare(listed), record_bytes, use())
        else:
            if not store.read_only and Board(store, lease=0, clock=clock).read().notes:
                logger.warning(
                    "disk cache %s: other servers share it; without disk_cache_shared this one deletes what they use",
                    store.url,
                )
            _delete(store, index.add_listed(listed, record_bytes, use()))
        store.papers.describe(namespace_digest(fields), {**fields, "model_name": config.model_name})
    except StoreError as error:
        if fleet is not None:
            fleet.close()
        raise ConfigError(f"host_disk_cache_dir: {error}") from error
    logger.info(
        "disk cache %s: %d pages, %.2f GB, listed in %.1f s",
        store.url,
        len(index),
        index.bytes / 1e9,
        clock() - started,
    )
    return DiskTier(store, index, fleet)


def open_disk_of_all(store: PageStore, leader: Leader) -> None:
    """Has the other processes open the same place. Raises `ConfigError` if one of them cannot, or sees another."""
    mark = ""
    try:
        if not store.read_only:
            mark = store.papers.mark(secrets.token_hex(REPLICA_BYTES))
        leader.ask("disk", mark)
    except StoreError as error:
        raise ConfigError(f"host_disk_cache_dir: {error}") from error
    finally:
        if mark:
            store.papers.unmark(mark)


def open_disk_as_told(config: EngineConfig, mark: str) -> tuple[PageStore | None, str]:
    """The disk of another process than 0, which has left a mark there; or what is wrong with it."""
    if config.host_disk_cache_dir is None:
        return None, "host_disk_cache_dir: missing, but process 0 has one"
    keep_freed_memory()
    try:
        store = PageStore(config.host_disk_cache_dir, read_only=config.disk_cache_read_only)
        seen = not mark or store.papers.sees(mark)
    except StoreError as error:
        return None, f"host_disk_cache_dir: {error}"
    if mark and store.read_only:
        return None, f"host_disk_cache_dir: {store.url} cannot be written, but process 0 writes there"
    if not seen:
        return None, (
            f"host_disk_cache_dir: {store.url} is not where process 0 writes: all processes need the same directory or"
            " bucket"
        )
    return store, ""


def _delete(store: PageStore, surplus: list[PageKey]) -> None:
    if store.local is not None and surplus:
        logger.info("disk cache: %d pages without a head or beyond its size are removed", len(surplus))
        for key in surplus:
            store.delete(key, lambda outcome: None)


def _join(
    store: PageStore,
    index: SharedIndex,
    record_bytes: int,
    lease: float,
    use: Callable[[], Use],
    clock: Callable[[], float],
) -> FleetThread:
    """Makes this process known to the others."""
    fleet = Fleet(secrets.token_bytes(REPLICA_BYTES), index, record_bytes=record_bytes, lease=lease)
    board = Board(store, lease=lease, clock=clock)
    thread = FleetThread(board, fleet, lease / TURNS_PER_LEASE, use)
    logger.info("disk cache %s: shared with %d other servers", store.url, fleet.stats.replicas - 1)
    return thread
