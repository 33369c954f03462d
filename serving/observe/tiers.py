"""Prometheus metrics of the cache's tiers, read from their own counters at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...engine.cache_control import COPY_LATENCY_BOUNDS_MS, CacheControl
from ...engine.prefetch import PrefetchStats

if TYPE_CHECKING:
    from ...engine.stats import EngineStats

DIRECTIONS = {
    "save": "device_to_host",
    "load": "host_to_device",
    "read": "disk_to_host",
    "write": "host_to_disk",
}
"""Kind of movement -> label."""
_DISK = ("read", "write")
_STATES = {
    "free": "free_pages",
    "evictable": "evictable_pages",
    "in_use": "in_use_pages",
    "total": "total_pages",
}


class TierCollector(Collector):
    """What every tier holds, was asked for, has lost and moved. Counters only grow; tiers that are not there are left out."""

    def __init__(
        self, stats: Callable[[], EngineStats], control: CacheControl, eviction_rate: Callable[[], float]
    ) -> None:
        self._stats = stats
        self._control = control
        self._eviction_rate = eviction_rate

    def collect(self) -> Iterator[Metric]:
        tiers = list(self._control.levels())
        yield from self._levels()
        stats = self._stats()
        for name, text, counts in (
            ("cache_tier_query_tokens", "Prompt tokens that no tier above had.", stats.queries_by_tier),
            ("cache_tier_hit_tokens", "Prompt tokens found, by where they were.", stats.cached_by_tier),
        ):
            yield _counter(name, text, ("tier",), {(tier,): counts[tier] for tier in tiers})
        evictions = self._control.evictions()
        yield _counter("cache_evicted_pages", "Pages that left a tier.", ("tier", "reason"), evictions)
        if (prefetch := self._control.prefetch_stats()) is not None:
            yield from self._copies(tiers)
            yield from _prefetch(prefetch)
            paused = self._control.write_pauses()
            yield _counter(
                "disk_write_pauses", "Times that writing paused after a failure.", (), {(): paused}
            )
            yield from self._sharing()
        if "disk" in tiers:
            yield GaugeMetricFamily(
                "tierax_disk_cache_eviction_rate",
                "Share of the disk cache's pages that were evicted in the last minute.",
                value=self._eviction_rate(),
            )

    def _sharing(self) -> Iterator[Metric]:
        """Of a disk cache to which other servers write, too."""
        shared = self._control.sharing()
        if shared.servers is not None:
            yield GaugeMetricFamily(
                "tierax_disk_cache_servers",
                "Servers alive that write to the disk cache.",
                value=shared.servers,
            )
            yield GaugeMetricFamily(
                "tierax_disk_cache_collects", "1 if this one deletes for all.", value=shared.collects
            )
            for name, text, value in (
                ("deleted_pages", "Pages that this server has deleted for all.", shared.deleted_pages),
                ("spared_pages", "Pages not deleted since another needed them.", shared.spared_pages),
            ):
                yield _counter(f"disk_cache_{name}", text, (), {(): value})
        if shared.searches is not None:
            counts = {(result,): count for result, count in shared.searches.items()}
            yield _counter("disk_cache_searches", "Prompts looked for on the disk.", ("result",), counts)

    def _levels(self) -> Iterator[Metric]:
        pages = GaugeMetricFamily("tierax_pages", "Pages of KV by tier and state.", labels=("tier", "state"))
        used_pages = GaugeMetricFamily(
            "tierax_cache_used_pages", "Pages that hold something.", labels=("tier",)
        )
        used = GaugeMetricFamily("tierax_cache_used_bytes", "Bytes of these pages.", labels=("tier",))
        capacity = GaugeMetricFamily(
            "tierax_cache_capacity_bytes", "Bytes that may be used.", labels=("tier",)
        )
        for tier, level in self._control.levels().items():
            for state, name in _STATES.items():
                if (count := getattr(level, name)) is not None:
                    pages.add_metric((tier, state), count)
            used_pages.add_metric((tier,), level.used_pages)
            used.add_metric((tier,), level.used_bytes)
            if level.capacity_bytes is not None:
                capacity.add_metric((tier,), level.capacity_bytes)
        yield from (pages, used_pages, used, capacity)

    def _copies(self, tiers: Sequence[str]) -> Iterator[Metric]:
        stats = self._control.copy_stats()
        kinds = {kind: DIRECTIONS[kind] for kind in DIRECTIONS if "disk" in tiers or kind not in _DISK}
        for name, text, counts in (
            ("cache_copied_bytes", "Bytes that arrived.", {k: stats[k].bytes for k in kinds}),
            ("cache_copied_pages", "Pages that arrived.", {k: stats[k].pages for k in kinds}),
        ):
            yield _counter(name, text, ("direction",), {(kinds[k],): count for k, count in counts.items()})
        failures = {
            (direction, outcome.value): count
            for kind, direction in kinds.items()
            for outcome, count in stats[kind].failures.items()
        }
        yield _counter(
            "cache_copy_failed_pages", "Pages that did not arrive.", ("direction", "outcome"), failures
        )
        latency = HistogramMetricFamily(
            "tierax_cache_copy_latency_ms",
            "Milliseconds of the copies themselves: batches of pages at the device, pages at the disk.",
            labels=("direction",),
        )
        for kind, direction in kinds.items():
            latency.add_metric((direction,), *_histogram(stats[kind].latency_counts, stats[kind].latency_ms))
        yield latency
        loads = HistogramMetricFamily(
            "tierax_l2_to_l1_latency_ms", "Milliseconds of copies from host to device, waiting left out."
        )
        loads.add_metric((), *_histogram(stats["load"].latency_counts, stats["load"].latency_ms))
        yield loads


def _prefetch(stats: PrefetchStats) -> Iterator[Metric]:
    for name, text, value in (
        ("prefetch_query_pages", "Pages that neither device nor host had on arrival.", stats.disk_queries),
        ("prefetch_hit_pages", "Those of them that the disk had.", stats.disk_hits),
        ("prefetch_declined_pages", "Pages computed since reading would take longer.", stats.declined_pages),
        ("prefetch_no_room_pages", "Pages not read for want of room on the host.", stats.no_room_pages),
        ("prefetch_timed_out_requests", "Requests that started before all had arrived.", stats.timed_out),
    ):
        yield _counter(name, text, (), {(): value})
    failed = {(outcome,): count for outcome, count in stats.failed_pages.copy().items()}
    yield _counter("prefetch_failed_pages", "Pages that could not be read.", ("outcome",), failed)


def _counter(
    name: str, text: str, labels: Sequence[str], counts: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"tierax_{name}", text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def _histogram(counts: Sequence[int], total: float) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets and the sum, of counts that have each copy in one bucket only."""
    buckets: list[tuple[str, float]] = []
    seen = 0
    for bound, count in zip((*COPY_LATENCY_BOUNDS_MS, float("inf")), counts, strict=True):
        seen += count
        buckets.append((floatToGoString(bound), seen))
    return buckets, total
