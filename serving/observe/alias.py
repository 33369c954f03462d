"""The same metrics under the names of other engines, for gateways and dashboards that know only those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class _Names:
    """One engine's names: ours without the prefix -> theirs, and its label for the reason of an end."""

    prefix: str
    names: Mapping[str, tuple[str, ...]]
    reason: str | None
    """Label of the reason; None: they count all ends together."""


_NAMES = {
    "vllm": _Names(
        "vllm:",
        {
            "requests_running": ("num_requests_running",),
            "requests_waiting": ("num_requests_waiting",),
            # The second is what older gateways ask for.
            "kv_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
            "cache_query_tokens": ("prefix_cache_queries", "prompt_tokens"),
            "cache_hit_tokens": ("prefix_cache_hits",),
            "generated_tokens": ("generation_tokens",),
            "retractions": ("num_preemptions",),
            "requests_finished": ("request_success",),
            "time_to_first_token_seconds": ("time_to_first_token_seconds",),
            "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
            "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
            "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
            "queue_time_seconds": ("request_queue_time_seconds",),
        },
        "finished_reason",
    ),
    "sglang": _Names(
        "sglang:",
        {
            "requests_running": ("num_running_reqs",),
            "requests_waiting": ("num_queue_reqs",),
            "kv_usage_ratio": ("token_usage",),
            "cache_hit_rate": ("cache_hit_rate",),
            "output_tokens_per_second": ("gen_throughput",),
            "cache_query_tokens": ("prompt_tokens",),
            "cache_hit_tokens": ("cached_tokens",),
            "generated_tokens": ("generation_tokens",),
            "requests_finished": ("num_requests",),
            "requests_aborted": ("num_aborted_requests",),
            "time_to_first_token_seconds": ("time_to_first_token_seconds",),
            "inter_token_latency_seconds": ("inter_token_latency_seconds",),
            "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
            "queue_time_seconds": ("queue_time_seconds",),
        },
        None,
    ),
}


def config_info(name: str, labels: Mapping[str, object]) -> Metric:
    """A gauge that is always 1, for what it says in its labels."""
    info = GaugeMetricFamily(name, "Size of the device's pool.", labels=[*labels])
    info.add_metric([str(value) for value in labels.values()], 1)
    return info


class AliasCollector(Collector):
    """What `sources` collect, again under the names that `alias` (one of `config.METRICS_ALIASES`) uses, labelled with the model."""

    def __init__(
        self, alias: str, engine: Engine, stats: Callable[[], EngineStats], sources: Sequence[Collector]
    ) -> None:
        self._alias = alias
        self._names = _NAMES[alias]
        self._engine = engine
        self._stats = stats
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for family in source.collect():
                for name in self._names.names.get(family.name.removeprefix("tierax_"), ()):
                    yield self._renamed(family, self._names.prefix + name)
        yield from self._pool()

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, f"{family.documentation} (tierax's {family.name}.)", family.type)
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        if family.name == "tierax_requests_finished":
            samples = self._ends(samples)
        renamed.samples = [
            sample._replace(
                name=name + sample.name.removeprefix(family.name),
                labels={**sample.labels, "model_name": self._engine.model_name},
            )
            for sample in samples
        ]
        return renamed

    def _ends(self, samples: list[Sample]) -> list[Sample]:
        reason = self._names.reason
        if reason is None:
            total = sum(sample.value for sample in samples)
            return [Sample("tierax_requests_finished_total", {}, total)]
        return [sample._replace(labels={reason: sample.labels["reason"]}) for sample in samples]

    def _pool(self) -> Iterator[Metric]:
        """What they say of the pool's size."""
        page, stats = self._engine.cache.page_size, self._stats()
        model = {"model_name": self._engine.model_name}
        names = ("block_size", "num_gpu_blocks") if self._alias == "vllm" else ("page_size", "num_pages")
        sizes = dict(zip(names, (page, stats.pages_total), strict=True))
        yield config_info(f"{self._alias}:cache_config_info", {**sizes, **model})
        if self._alias == "vllm":
            return
        for name, text, pages in (
            ("num_used_tokens", "Tokens whose KV running requests hold.", stats.pages_in_use),
            ("max_total_num_tokens", "Tokens for which the device has room.", stats.pages_total),
        ):
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=[*model])
            gauge.add_metric([*model.values()], pages * page)
            yield gauge
