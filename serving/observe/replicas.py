"""Prometheus metrics of each copy of the model, where there are several; the others show their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ...engine.thread import EngineThread


class ReplicaCollector(Collector):
    """How the load and the hits are spread, with a label `replica`."""

    def __init__(self, replicas: Sequence[EngineThread]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        stats = [thread.stats for thread in self._replicas]
        for name, text, values in (
            ("requests_running", "Requests in the batch.", [one.running for one in stats]),
            ("requests_waiting", "Requests that wait.", [one.waiting for one in stats]),
            ("kv_pages_in_use", "Device pages that requests hold.", [one.pages_in_use for one in stats]),
        ):
            gauge = GaugeMetricFamily(f"tierax_replica_{name}", text, labels=("replica",))
            for number, value in enumerate(values):
                gauge.add_metric((str(number),), value)
            yield gauge
        for name, text, values in (
            ("cache_query_tokens", "Prompt tokens of admitted requests.", [x.prompt_tokens for x in stats]),
            ("cache_hit_tokens", "Prompt tokens found in the cache.", [x.cached_tokens for x in stats]),
            ("generated_tokens", "Tokens generated.", [x.generated_tokens for x in stats]),
            ("faults", "Steps that failed on the device.", [x.faults for x in stats]),
        ):
            counter = CounterMetricFamily(f"tierax_replica_{name}", text, labels=("replica",))
            for number, value in enumerate(values):
                counter.add_metric((str(number),), value)
            yield counter
