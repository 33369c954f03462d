"""What operators ask of the cache: how full it is, drop this, keep that. Knows nothing of HTTP.

But for the plain counters of `levels` and `evictions`, everything runs in the engine's thread, between two steps.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..cache.mover_stats import LATENCY_BOUNDS_MS as COPY_LATENCY_BOUNDS_MS
from ..cache.pins import Pin, PinError, Pins
from ..cache.radix_tree import DEVICE, HOST
from .tree_picture import picture

if TYPE_CHECKING:
    from ..cache.mover_stats import KindStats
    from ..cache.tier import Tier
    from .engine import Engine
    from .prefetch import PrefetchStats

__all__ = [
    "COPY_LATENCY_BOUNDS_MS",
    "TIERS",
    "CacheControl",
    "Dropped",
    "Level",
    "Pin",
    "PinError",
    "Sharing",
]

logger = logging.getLogger(__name__)

TIERS = ("device", "host", "disk")
_LEVELS = {"device": DEVICE, "host": HOST}


@dataclass(frozen=True, slots=True)
class Level:
    """How full a tier is, in pages and bytes. On the disk nothing is free or in use in this sense."""

    used_pages: int
    used_bytes: int
    total_pages: int | None = None
    capacity_bytes: int | None = None
    """None: no bound of its own."""
    free_pages: int | None = None
    evictable_pages: int | None = None
    in_use_pages: int | None = None


@dataclass(slots=True)
class Dropped:
    """What became of a tier's pages, or of a namespace's in that tier."""

    dropped_pages: int
    kept_pages: int = 0
    """Pages that stay, since somebody uses them."""
    pinned_pages: int = 0
    """Those of them that are pinned."""
    reason: str | None = None
    """Why nothing could be dropped."""

    @property
    def complete(self) -> bool:
        """Nothing stays but what is pinned."""
        return self.reason is None and self.kept_pages <= self.pinned_pages


@dataclass(slots=True)
class Sharing:
    """Of a disk cache to which other servers write, too; None where it is not shared, or this one only reads."""

    servers: int | None = None
    """Alive."""
    collects: int | None = None
    """1 if this one deletes for all."""
    deleted_pages: int = 0
    spared_pages: int = 0
    """Not deleted since another needed them."""
    searches: dict[str, int] | None = None
    """Prompts looked for on the disk, by result."""


class CacheControl:
    """Beside one engine; `pin_share` is the share of the host's pages that may be pinned."""

    def __init__(self, engine: Engine, pin_share: float) -> None:
        self._engine = engine
        self._cache = engine.cache
        # With a host cache of size 0, the host pages are only what the disk is read through.
        no_host = engine.config.host_cache_bytes(1 << 60, 1 << 60) == 0
        self.pins = Pins(engine.cache, pin_share, staging_only=no_host)
        self.cleared: Counter[str] = Counter()
        """Pages dropped by `drop`, by tier; only grows."""

    # Counters, readable in any thread.

    def levels(self) -> dict[str, Level]:
        """The tiers that there are, from the top."""
        engine, cache = self._engine, self._cache
        found = {"device": _level(cache.device, engine.page_bytes)}
        if cache.host.num_pages:
            found["host"] = _level(cache.host, engine.page_bytes)
        if engine.tiers is not None and engine.tiers.index is not None:
            index = engine.tiers.index
            found["disk"] = Level(len(index), index.bytes, capacity_bytes=index.capacity)
        return found

    def evictions(self) -> dict[tuple[str, str], int]:
        """Pages that left, by tier and reason; they only grow."""
        found = {}
        for name, level in _LEVELS.items():
            tier = self._cache.tiers.tiers[level]
            if tier.num_pages:
                found[name, "capacity"] = tier.evicted_pages
                found[name, "ttl"] = tier.expired_pages
                found[name, "cleared"] = self.cleared[name]
        if self._engine.tiers is not None and self._engine.tiers.index is not None:
            reasons = self._engine.tiers.index.stats.evicted_pages.copy()
            for reason in ("capacity", "space_floor", "ttl", "cleared", *reasons):
                found["disk", reason] = reasons[reason]
        return found

    def disk_churn(self) -> tuple[int, int]:
        """Pages evicted from the disk for want of room or by age so far, and pages that it holds; (0, 0) without one."""
        if self._engine.tiers is None or self._engine.tiers.index is None:
            return 0, 0
        index = self._engine.tiers.index
        return sum(index.stats.evicted_pages[reason] for reason in ("capacity", "space_floor", "ttl")), len(
            index
        )

    def copies(self) -> dict[str, dict[str, int]]:
        """By kind of movement: pages and bytes that have arrived (they only grow), and pages under way."""
        if self._engine.tiers is None:
            return {}
        mover = self._engine.tiers.mover
        under_way = mover.in_flight()
        return {
            kind: {"pages": stats.pages, "bytes": stats.bytes, "in_flight_pages": under_way[kind]}
            for kind, stats in mover.stats.kinds.items()
        }

    def copy_stats(self) -> Mapping[str, KindStats]:
        """By kind of movement; nothing without tiers below the device."""
        return {} if self._engine.tiers is None else self._engine.tiers.mover.stats.kinds

    def prefetch_stats(self) -> PrefetchStats | None:
        """None without tiers below the device."""
        return None if self._engine.tiers is None else self._engine.tiers.transfers.prefetcher.stats

    def write_pauses(self) -> int:
        """Times that writing to the disk paused after a failure."""
        return 0 if self._engine.tiers is None else self._engine.tiers.transfers.writer.stats.paused

    def sharing(self) -> Sharing:
        """How the disk cache is shared."""
        found = Sharing()
        if self._engine.tiers is None:
            return found
        fleet, search = self._engine.tiers.fleet, self._engine.tiers.transfers.prefetcher.search
        if fleet is not None:
            stats = fleet.fleet.stats
            found.servers, found.collects = stats.replicas, int(fleet.fleet.collects)
            found.deleted_pages, found.spared_pages = stats.deleted_pages, stats.spared_pages
        if search is not None:
            prober = search.prober
            found.searches = {"found": prober.hits, "absent": prober.asked - prober.hits}
        return found

    def pinned(self) -> tuple[int, int]:
        """Host pages that are pinned, and how many may be."""
        return self.pins.pages, self.pins.quota_pages

    # In the engine's thread.

    def picture(self, limit: int) -> dict[str, Any]:
        """What `tree_picture.picture` says of the tree, in at most `limit` nodes."""
        tiers = self._engine.tiers
        return picture(self._cache.tiers, tiers.index if tiers is not None else None, limit)

    def stat(self) -> dict[str, Any]:
        """Pages, bytes and hits by tier, and what each namespace has; plain values, ready to be sent."""
        engine, stats = self._engine, self._engine.stats
        self.pins.restore()
        tiers: dict[str, Any] = {
            name: {key: value for key, value in asdict(level).items() if value is not None}
            for name, level in self.levels().items()
        }
        if "host" in tiers:
            tiers["host"] |= {"pinned_pages": self.pins.pages, "pin_quota_pages": self.pins.quota_pages}
        if engine.tiers is not None and engine.tiers.store is not None:
            tiers["disk"] |= {"location": engine.tiers.store.url, "read_only": engine.tiers.store.read_only}
            if engine.tiers.fleet is not None:
                fleet = engine.tiers.fleet.fleet
                tiers["disk"] |= {"servers": fleet.stats.replicas, "collects": fleet.collects}
        return {
            "page_size": self._cache.page_size,
            "page_bytes": engine.page_bytes,
            "tiers": tiers,
            "tokens": {
                "queries": stats.prompt_tokens,
                "hits": stats.cached_tokens,
                "hits_by_tier": dict(stats.cached_by_tier),
            },
            "requests": {"running": stats.running, "waiting": stats.waiting},
            "namespaces": self._namespaces(),
        }

    def drop(self, tiers: Iterable[str], namespace: str | None = None) -> dict[str, Dropped]:
        """Drops what nobody uses from these tiers, of one namespace (its name or first digits, in hex) or of all.

        Raises KeyError for a namespace that is in none of the tiers, ValueError for one that several names begin with.
        """
        digest = (
            None
            if namespace is None
            else find_namespace((row["namespace"] for row in self._namespaces()), namespace)
        )
        return {
            tier: self._drop_disk(digest) if tier == "disk" else self._drop_memory(tier, digest)
            for tier in tiers
            if tier in self.levels()
        }

    def drop_if_there(self, tiers: Iterable[str], namespace: str | None) -> dict[str, Dropped]:
        """The same, and nothing of a namespace that is in none of the tiers."""
        try:
            return self.drop(tiers, namespace)
        except KeyError:
            return {tier: Dropped(0) for tier in tiers if tier in self.levels()}

    def match_length(self, namespace: bytes, tokens: array[int]) -> int:
        """How many leading tokens device or host hold."""
        return self._cache.match_length(namespace, tokens)

    def _drop_memory(self, name: str, digest: bytes | None) -> Dropped:
        cache, level = self._cache, _LEVELS[name]
        before = self._held(level, digest)
        if digest is None:
            cache.clear(level)
        for namespace, root in list(cache.tiers.tree.roots.items()):
            if root.page_keys()[0] == digest:
                cache.clear(level, namespace)
        kept = self._held(level, digest)
        self.cleared[name] += before - kept
        pinned = self.pins.pages_of(digest) if level == HOST else 0
        return Dropped(before - kept, kept, pinned)

    def _drop_disk(self, digest: bytes | None) -> Dropped:
        tiers = self._engine.tiers
        assert tiers is not None
        assert tiers.index is not None
        assert tiers.store is not None
        if tiers.store.read_only:
            return Dropped(0, len(tiers.index), reason="the disk cache is read-only")
        doomed = tiers.index.clear(digest)
        tiers.mover.delete(doomed)
        return Dropped(len(doomed))

    def _held(self, level: int, digest: bytes | None) -> int:
        """Pages that a tier has in use or holds, of a namespace or in all."""
        tier = self._cache.tiers.tiers[level]
        if digest is None:
            return tier.num_pages - tier.free
        return self._by_namespace(level).get(digest, 0)

    def _by_namespace(self, level: int) -> Counter[bytes]:
        found: Counter[bytes] = Counter()
        for root in self._cache.tiers.tree.roots.values():
            nodes = [*root.children.values()]
            for node in nodes:
                nodes.extend(node.children.values())
                found[root.page_keys()[0]] += len(node.runs[level].pages)
        return found

    def _namespaces(self) -> list[dict[str, Any]]:
        device, host = self._by_namespace(DEVICE), self._by_namespace(HOST)
        index = self._engine.tiers.index if self._engine.tiers is not None else None
        disk = index.namespaces() if index is not None else {}
        rows = []
        for digest in sorted({*device, *host, *disk}):
            row = {"namespace": digest.hex(), "device_pages": device[digest], "host_pages": host[digest]}
            if index is not None:
                stored = disk.get(digest)
                row["disk_pages"] = stored.pages if stored is not None else 0
                row["disk_bytes"] = stored.bytes if stored is not None else 0
            rows.append(row)
        return rows

    def pin(self, namespace: bytes, token_ids: list[int]) -> dict[str, Any]:
        """Pins a prefix whose pages device or host have. Raises `PinError`."""
        self.pins.restore()
        return _shown(self.pins.pin(namespace, array("i", token_ids)))

    def check_pin(self, namespace: bytes, token_ids: list[int]) -> None:
        """Raises `PinError` for what could not be pinned even if it were cached."""
        self.pins.check(namespace, array("i", token_ids))

    def unpin(self, pin_id: str) -> dict[str, Any]:
        """Lets go of a pin, and tells of it. Raises KeyError if there is none."""
        pin = self.pins.unpin(pin_id)
        return {"id": pin.id, "pages": pin.pages, "tokens": len(pin.tokens)}

    def pin_id(self, namespace: bytes, token_ids: list[int]) -> str:
        """The id that a pin of this prefix has."""
        return self.pins.id_of(namespace, array("i", token_ids))

    def restore_pins(self) -> None:
        """After a fault of the device, which voids every hold."""
        incomplete = self.pins.restore()
        if incomplete:
            logger.warning("%d pinned prefixes are not whole any more: pin them again", incomplete)

    def list_pins(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Every pin with its namespace, in the order of pinning."""
        self.pins.restore()
        return [(pin.namespace, _shown(pin)) for pin in self.pins]


def find_namespace(known: Iterable[str], prefix: str) -> bytes:
    """The digest that begins so, in hex. Raises KeyError if there is none, ValueError if there are several."""
    found = [name for name in known if name.startswith(prefix.lower())]
    if not prefix or not found:
        raise KeyError(prefix)
    if len(found) > 1:
        raise ValueError(f"{len(found)} namespaces start with {prefix!r}")
    return bytes.fromhex(found[0])


def _level(tier: Tier, page_bytes: int) -> Level:
    free, evictable = tier.free, tier.evictable
    return Level(
        used_pages=tier.num_pages - free,
        used_bytes=(tier.num_pages - free) * page_bytes,
        total_pages=tier.num_pages,
        capacity_bytes=tier.num_pages * page_bytes,
        free_pages=free,
        evictable_pages=evictable,
        in_use_pages=max(tier.num_pages - free - evictable, 0),
    )


def _shown(pin: Pin) -> dict[str, Any]:
    return {"id": pin.id, "pages": pin.pages, "held_pages": pin.held_pages, "tokens": len(pin.tokens)}
