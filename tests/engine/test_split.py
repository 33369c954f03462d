"""A model on several devices answers as it does on one, out of the same host and disk caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.split_engine import PAGE, PROMPTS
from tierax.engine.config import ConfigError, EngineConfig
from tierax.engine.placement import choose_devices

TESTS = Path(__file__).parents[1]
# One device writes, four read it: two hold the same KV head each.
QUICK: dict[str, Any] = {"family": "qwen2-window", "kv": "f32", "devices": [1, 4]}
FAMILIES = ("llama3", "llama-bias", "qwen2-window", "qwen3", "mistral-window")
SLOW = [{"family": family, "kv": "f32", "devices": [1, 2, 4, 8], "sampled": True} for family in FAMILIES]
# Records go from eight devices to one, and to three, where there are places without a head.
SLOW.append({"family": "llama-bias", "kv": "fp8", "devices": [8, 1, 3], "memory": 2})


def run(*cases: dict[str, Any]) -> list[list[dict[str, Any]]]:
    environment = os.environ | {
        # Much is compiled, and little computed.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
    }
    command = [sys.executable, "-m", "helpers.split_engine", json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case",
    [QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: f"{case['family']}-{case['kv']}-{'-'.join(map(str, case['devices']))}",
)
def test_any_number_of_devices_answers_alike_out_of_one_disk_cache(case: dict[str, Any]) -> None:
    (results,) = run(case)
    first, *others = results[: len(case["devices"])]
    whole = [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]
    assert [sum(tiers.values()) for tiers in first["by_tier"]] == [0] * len(PROMPTS)
    for result in (first, *others):
        assert not result["errors"]
        assert result["greedy"] == first["greedy"]
        assert result["again"] == first["greedy"]
        assert result["sampled"] == first["sampled"]
        assert result["scores"] == pytest.approx(first["scores"], abs=1e-3 if case["kv"] == "f32" else 0.2)
        # Pages had to go, and were found on some floor or other.
        assert result["evicted"] > 0
        found: dict[str, int] = {"device": 0, "host": 0, "disk": 0}
        for tiers in result["by_tier_again"]:
            for tier, tokens in tiers.items():
                found[tier] += tokens
        assert found["host"] + found["disk"] > 0
        assert sum(found.values()) == sum(whole)
        assert result["page_bytes"] == first["page_bytes"]
    for result in others:
        # What comes up at once has to fit into the few rows of the host.
        assert [tiers["disk"] for tiers in result["by_tier"]][:3] == whole[:3]
        assert all(tiers["disk"] > 0 for tiers in result["by_tier"])
    if case.get("memory"):
        sizes = results[-1]
        assert sizes["not_aliased"] == [0, 0]
        assert sizes["temp"][0] == sizes["temp"][1]


def test_more_devices_than_there_are_is_told_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"tp_size: 4 devices are asked for, but jax finds 1 \(cpu\)"
    ) as caught:
        choose_devices(4)
    assert "--xla_force_host_platform_device_count=N" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tp_size": 0}, "tp_size: 0 must be a whole number of at least 1"),
        ({"num_processes": 2}, "coordinator_address: several processes need host:port of process 0"),
        (
            {"num_processes": 2, "tp_size": 3, "coordinator_address": "a:1"},
            "tp_size: 3 devices cannot be shared out evenly among 2 processes",
        ),
        ({"coordinator_address": "a"}, "coordinator_address: 'a' must be host:port"),
        ({"process_id": 1}, "process_id: 1 must be a whole number from 0 to 0"),
        (
            {
                "num_processes": 2,
                "tp_size": 2,
                "coordinator_address": "a:1",
                "host_disk_cache_dir": "memory://",
            },
            "host_disk_cache_dir: no process sees another one's memory",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.create("demo", **settings)
    assert complaint in str(caught.value)


def test_the_channel_has_the_port_behind_the_coordinators() -> None:
    config = EngineConfig.create("demo", coordinator_address="[::1]:1234", num_processes=2, tp_size=2)
    assert config.channel_address == ("::1", 1235)


@pytest.mark.slow
def test_the_demo_on_three_devices_says_what_it_says_on_one() -> None:
    def generate(devices: int) -> str:
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(TESTS.parent / "src"),
        }
        words = ["generate", "demo", "--prompt", "The capital of France is", "--temperature", "0"]
        words += ["--max-tokens", "12", "--context-length", "512", "--tp-size", str(devices)]
        done = subprocess.run(
            [sys.executable, "-m", "tierax", *words],
            env=environment,
            capture_output=True,
            text=True,
            cwd=TESTS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert generate(3) == generate(1) != ""
