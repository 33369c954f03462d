"""Metrics under other engines' names, and a dashboard for Grafana that names only what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_engine import say
from helpers.live_server import Live, eventually
from helpers.tiered_engine import TieredEngine
from tierax.engine.config import ConfigError
from tierax.serving.config import METRICS_ALIASES, ServerConfig

pytestmark = pytest.mark.asyncio

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana.json"


async def used(serve: Any, **options: Any) -> tuple[Live, dict[str, float]]:
    """A server after two equal calls, and its metrics."""
    live = await serve(say("Hello"), **options)
    for _ in range(2):
        await live.complete("a prompt", max_tokens=8)
    await eventually(lambda: live.engine.stats.running == 0)
    return live, await live.metrics()


async def test_vllm_names(serve):
    _, metrics = await used(serve, metrics_alias="vllm")
    model = 'model_name="fake"'

    def value(name: str, labels: str = "") -> float:
        return metrics[f"vllm:{name}{{{labels}{model}}}"]

    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == value("gpu_cache_usage_perc") == 0
    assert value("prefix_cache_queries_total") == value("prompt_tokens_total") == 16
    assert value("prefix_cache_hits_total") == 7
    assert value("generation_tokens_total") == metrics["tierax_generated_tokens_total"] == 12
    assert value("num_preemptions_total") == 0
    assert value("request_success_total", 'finished_reason="stop",') == 2
    for name in (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        "request_time_per_output_token_seconds",
    ):
        assert value(f"{name}_count") == 2
        assert value(f"{name}_bucket", 'le="+Inf",') == 2
    assert value("inter_token_latency_seconds_count") == value("time_per_output_token_seconds_count") > 2
    info = next(name for name in metrics if name.startswith("vllm:cache_config_info"))
    assert 'block_size="16"' in info
    assert 'num_gpu_blocks="64"' in info
    assert metrics["tierax_time_to_first_token_seconds_count"] == 2
    assert not any(name.startswith("sglang:") for name in metrics)


async def test_sglang_names(serve):
    _, metrics = await used(serve, metrics_alias="sglang")

    def value(name: str, labels: str = "") -> float:
        return metrics[f'sglang:{name}{{{labels}model_name="fake"}}']

    assert value("num_running_reqs") == value("num_queue_reqs") == value("token_usage") == 0
    assert value("cache_hit_rate") == pytest.approx(7 / 16)
    assert value("gen_throughput") > 0
    assert value("prompt_tokens_total") == 16
    assert value("cached_tokens_total") == 7
    assert value("generation_tokens_total") == 12
    assert value("num_requests_total") == 2
    assert value("num_aborted_requests_total") == 0
    assert value("num_used_tokens") == 0
    assert value("max_total_num_tokens") == 64 * 16
    assert metrics['sglang:cache_config_info{model_name="fake",num_pages="64",page_size="16"}'] == 1
    assert metrics['tierax_cache_config_info{block_size="16",num_blocks="64"}'] == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "queue_time_seconds"):
        assert value(f"{name}_bucket", 'le="+Inf",') == value(f"{name}_count") == 2


async def test_no_alias_unless_asked_for(serve):
    _, metrics = await used(serve)
    assert not any(":" in name.partition("{")[0] for name in metrics)


async def test_help_and_type_come_once_per_name(serve):
    live, _ = await used(serve, metrics_alias="vllm")
    async with live.session.get(live.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE vllm:")]
    assert len(types) == len(set(types)) > 10
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in lines
    assert "# TYPE vllm:prefix_cache_hits_total counter" in lines


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0",
        "text/plain;version=1.0.0;escaping=underscores",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
    ],
)
async def test_colons_reach_every_scraper(serve, accept):
    live, _ = await used(serve, metrics_alias="vllm")
    async with live.session.get(live.url + "/metrics", headers={"Accept": accept}) as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    assert 'vllm:prefix_cache_hits_total{model_name="fake"} 7.0' in text
    assert not any(line.startswith("vllm_") for line in text.splitlines())


async def test_an_unknown_alias_is_refused():
    assert METRICS_ALIASES == ("sglang", "vllm")
    with pytest.raises(ConfigError, match="metrics_alias: 'tgi' must be one of sglang, vllm"):
        ServerConfig(metrics_alias="tgi")


async def test_grafana_names_only_what_there_is(serve):
    live = await serve(engine=TieredEngine())
    await live.complete("some prompt", max_tokens=2)
    await live.get("/health")
    there = {name.partition("{")[0] for name in await live.metrics()}
    dashboard = json.loads(GRAFANA.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    named = {
        name
        for query in queries
        for name in re.findall(r"\b[a-z]+_[a-z0-9_]+\b", query)
        if name.startswith("tierax_")
    }
    assert len(queries) >= 12
    assert named - there == set()
    # Labels that are asked for are there too.
    assert "tierax_time_to_first_token_seconds_bucket" in named
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["title"] for panel in dashboard["panels"])
