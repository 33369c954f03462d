"""Prometheus metrics: the engine's own counters read at each scrape, and latencies observed per request."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engine.cache_control import CacheControl
from ...engine.request import Request
from ...engine.stats import EngineStats
from .alias import AliasCollector, config_info
from .replicas import ReplicaCollector
from .tiers import TierCollector

if TYPE_CHECKING:
    from ..core.service import EngineRunner

WINDOW = 60.0
"""Seconds over which rates are taken."""

_LONG = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075)
BUCKETS = _SHORT + _LONG
"""Seconds, from a millisecond to half an hour."""
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 5, 10)
"""Seconds that the event loop is late."""
TOKEN_BUCKETS = (0.0005, *_SHORT, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 300, 1800)
"""Seconds between tokens."""

MOST_RECENT = 4096
"""Values that a `RecentHistogram` keeps."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    busy_seconds: float
    disk_evicted: int
    disk_pages: int


class RecentHistogram:
    """A histogram that also keeps the latest values, for who wants more than buckets."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._recent: deque[float] = deque(maxlen=MOST_RECENT)

    def observe(self, seconds: float) -> None:
        self._histogram.observe(seconds)
        self._recent.append(seconds)

    def take_recent(self) -> list[float]:
        """The values since the last call, or the latest of them when they were very many."""
        taken = list(self._recent)
        self._recent.clear()
        return taken


class ServingMetrics:
    """All metrics of one server, in a registry of its own. `clock` gives seconds, monotonic.

    `alias`: the engine under whose names the most used ones are shown once more.
    """

    def __init__(
        self,
        thread: EngineRunner,
        control: CacheControl,
        clock: Callable[[], float],
        alias: str | None = None,
    ):
        engine = thread.engine
        self._stats: Callable[[], EngineStats] = lambda: thread.stats
        self._control = control
        self._clock = clock
        self._samples: deque[_Sample] = deque()
        self.registry = CollectorRegistry()
        engine_collector = _EngineCollector(self, self._stats, engine.cache.page_size)
        self.registry.register(engine_collector)
        self.registry.register(TierCollector(self._stats, control, self.disk_eviction_rate))
        if len(thread.replicas) > 1:
            self.registry.register(ReplicaCollector(thread.replicas))
        # Memory, descriptors and processor time of this process.
        ProcessCollector(namespace="tierax", registry=self.registry)
        self.tasks = Gauge("tierax_event_loop_tasks", "Tasks of the event loop.", registry=self.registry)
        ttft = self._histogram(
            "time_to_first_token_seconds", "From the call's arrival to its first token.", BUCKETS
        )
        self.ttft = RecentHistogram(ttft)
        self.loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "By how much the server's event loop was late, now and then.",
            LAG_BUCKETS,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one choice.", TOKEN_BUCKETS
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "Mean per token after the first, once a choice.", TOKEN_BUCKETS
        )
        self._queue = self._histogram(
            "queue_time_seconds", "From the engine's receipt to the first scheduled step.", BUCKETS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From the call's arrival to the last token.", BUCKETS
        )
        self._http = Counter(
            "tierax_http_requests",
            "Answers by route and status.",
            ("route", "status"),
            registry=self.registry,
        )
        self.constrained = Counter(
            "tierax_constrained_calls",
            "Calls whose answers are held to a form, by the kind of constraint.",
            ("kind",),
            registry=self.registry,
        )
        self.constraints_refused = Counter(
            "tierax_constraints_refused",
            "Calls refused because their constraint cannot be enforced, by its kind.",
            ("kind",),
            registry=self.registry,
        )
        self.constraint_compile = self._histogram(
            "constraint_compile_seconds",
            "Until a call's constraint was known to be sound, waiting for a worker included.",
            BUCKETS,
        )
        if alias is not None:
            sources = (engine_collector, ttft, self.inter_token, self._tpot, self._queue, self._e2e)
            self.registry.register(AliasCollector(alias, engine, self._stats, sources))
        self.sample()

    def observe_finished(self, request: Request, seconds: float) -> None:
        """Takes a finished request's times; `seconds` is how long its call has taken."""
        self._e2e.observe(seconds)
        if request.first_scheduled is not None:
            self._queue.observe(request.first_scheduled - request.arrival)
        if request.first_token is not None and request.finished_at is not None and request.num_output > 1:
            self._tpot.observe((request.finished_at - request.first_token) / (request.num_output - 1))

    def count_answer(self, route: str, status: int) -> None:
        """Counts an HTTP answer; `route` is a route's pattern, never what the client wrote."""
        self._http.labels(route, str(status)).inc()

    def sample(self) -> None:
        """Notes the counters that rates are derived from; called every second or so."""
        now = self._clock()
        stats = self._stats()
        self._samples.append(
            _Sample(
                now,
                stats.prompt_tokens,
                stats.cached_tokens,
                stats.generated_tokens,
                stats.device_busy_seconds,
                *self._control.disk_churn(),
            )
        )
        # One sample older than the window stays, to measure the whole of it.
        while len(self._samples) > 1 and self._samples[1].at <= now - WINDOW:
            self._samples.popleft()

    def hit_rate(self) -> float:
        """Cached share of the prompt tokens of the last minute; NaN when there were none."""
        stats, old = self._stats(), self._samples[0]
        queries = stats.prompt_tokens - old.prompt_tokens
        return (stats.cached_tokens - old.cached_tokens) / queries if queries else math.nan

    def output_rate(self) -> float:
        """Tokens generated per second of the last minute; NaN right after the start."""
        old = self._samples[0]
        elapsed = self._clock() - old.at
        return (self._stats().generated_tokens - old.generated_tokens) / elapsed if elapsed > 0 else math.nan

    def busy_ratio(self) -> float:
        """Share of the last minute in which the device computed; NaN right after the start."""
        old = self._samples[0]
        elapsed = self._clock() - old.at
        busy = self._stats().device_busy_seconds - old.busy_seconds
        return min(1.0, busy / elapsed) if elapsed > 0 else math.nan

    def disk_eviction_rate(self) -> float:
        """Pages evicted from the disk in the last minute, as a share of those that it held then or holds now."""
        old = self._samples[0]
        evicted, pages = self._control.disk_churn()
        return (evicted - old.disk_evicted) / max(old.disk_pages, pages, 1)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tierax_{name}", text, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Reads the engine's counters when scraped, so that nothing is counted twice or reset."""

    def __init__(self, metrics: ServingMetrics, stats: Callable[[], EngineStats], page_size: int):
        self._metrics = metrics
        self._stats = stats
        self._page_size = page_size

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("cache_query_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("cache_hit_tokens", "Prompt tokens found in the cache.", stats.cached_tokens),
            ("generated_tokens", "Tokens generated.", stats.generated_tokens),
            ("retractions", "Running requests sent back to wait for lack of pages.", stats.retractions),
            ("compiles", "Device programs compiled.", stats.compiles),
            ("loaded_programs", "Device programs loaded from the compile cache.", stats.loaded_programs),
            (
                "constrained_tokens",
                "Generated tokens of requests with a constraint.",
                stats.constrained_tokens,
            ),
            (
                "jumped_tokens",
                "Those that the constraint forced, taken without a step each.",
                stats.jumped_tokens,
            ),
            ("masks", "How often it was found out which tokens may come next.", stats.masks),
            ("mask_seconds", "Seconds of the loop for that, while the device computes.", stats.mask_seconds),
            ("steps", "Steps run.", stats.steps),
            ("host_seconds", "Seconds of the loop outside waiting for the device.", stats.host_seconds),
            ("device_busy_seconds", "Seconds in which the device computed.", stats.device_busy_seconds),
        ):
            yield CounterMetricFamily(f"tierax_{name}", text, value=value)
        finished = CounterMetricFamily(
            "tierax_requests_finished", "Requests ended, by reason.", labels=("reason",)
        )
        for reason, count in stats.finished.copy().items():
            finished.add_metric((reason,), count)
        yield finished
        aborted = stats.finished.get("abort", 0)
        yield CounterMetricFamily("tierax_requests_aborted", "Requests aborted.", value=aborted)
        for name, text, value in (
            ("requests_waiting", "Requests that wait for their first step or for pages.", stats.waiting),
            ("requests_running", "Requests in the batch.", stats.running),
            ("kv_usage_ratio", "Share of the device's pages held by running requests.", _usage(stats)),
            (
                "output_tokens_per_second",
                "Tokens generated per second of the last minute.",
                self._metrics.output_rate(),
            ),
            ("cache_hit_rate", "Cached share of the last minute's prompt tokens.", self._metrics.hit_rate()),
            (
                "device_busy_ratio",
                "Share of the last minute the device computed.",
                self._metrics.busy_ratio(),
            ),
        ):
            yield GaugeMetricFamily(f"tierax_{name}", text, value=value)
        sizes = {"block_size": self._page_size, "num_blocks": stats.pages_total}
        yield config_info("tierax_cache_config_info", sizes)


def _usage(stats: EngineStats) -> float:
    return stats.pages_in_use / stats.pages_total if stats.pages_total else math.nan
