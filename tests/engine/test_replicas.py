"""Copies of a model on devices of their own answer as a single one does (DEFECTS i1, i5)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.replica_engines import NEXT_TURN, PROMPTS
from helpers.serve_process import ServeProcess
from helpers.split_engine import GREEDY, PAGE
from helpers.tiny_text_model import write_tiny_text_model
from tierax.engine.config import ConfigError, EngineConfig
from tierax.engine.placement import place_replica
from tierax.engine.platform import device_memory
from tierax.models.config import ModelConfig

TESTS = Path(__file__).parents[1]


def run(case: dict[str, Any]) -> dict[str, Any]:
    environment = os.environ | {
        # Much is compiled, and little computed.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
    }
    command = [sys.executable, "-m", "helpers.replica_engines", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case",
    [
        {"copies": [1, 2], "devices": 1},
        pytest.param({"copies": [1, 4], "devices": 1, "sampled": True}, marks=pytest.mark.slow),
        pytest.param({"copies": [1, 2], "devices": 2, "sampled": True}, marks=pytest.mark.slow),
    ],
    ids=["two", "four", "two-of-two-devices"],
)
def test_copies_answer_as_one_and_conversations_stay(case: dict[str, Any]) -> None:
    found = run(case)
    single, several = found["runs"]
    copies, devices = case["copies"][1], case["devices"]
    assert not single["errors"]
    assert not several["errors"]
    assert several["tokens"] == single["tokens"]
    # Each on devices of its own, all with work to do.
    ids = [[copy * devices + i for i in range(devices)] for copy in range(copies)]
    assert several["devices"] == several["pools"] == ids
    assert min(several["prompt_tokens"]) > 0
    assert several["total"] == sum(several["prompt_tokens"]) == single["total"]
    # A second turn finds all of the first, where it was: whole pages of what was computed.
    turns = [len(prompt) + GREEDY.max_tokens + len(NEXT_TURN) for prompt in PROMPTS]
    whole = [(turn - len(NEXT_TURN) - 1) // PAGE * PAGE for turn in turns]
    assert several["cached"] == single["cached"] == whole
    assert several["cached_on_device"] == whole
    # The same sizes, and the host's divided.
    (alone,) = single["pages"]
    assert several["pages"] == [[alone[0], alone[1] // copies]] * copies
    # Those that started earlier hear of the later ones when they next look.
    assert max(several["servers"]) == copies
    if devices > 1:
        assert "dp_size: 3 copies on 2 devices each take 6 devices, but jax finds 4 (cpu)" in found["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_after_the_warm_up_no_copy_compiles_and_a_second_start_loads_what_the_first_compiled(
    devices: int,
) -> None:
    first, second = run({"copies": [2], "devices": devices, "warm": True})["runs"]
    assert first["programs"] == second["programs"] > 0
    assert first["later"] == second["later"] == 0
    assert first["compiled"] > 10 * second["compiled"]
    assert second["loaded"] > 0


@pytest.mark.slow
def test_a_server_of_two_copies_ends_well_and_one_of_a_single_finds_their_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    write_tiny_text_model(tmp_path / "model")
    flags = ["--page-size", "16", "--context-length", "512", "--max-num-seqs", "2", "--skip-warmup"]
    flags += ["--max-num-batched-tokens", "64", "--device-cache-size", "4MiB", "--host-cache-size", "8MiB"]
    flags += [
        "--host-disk-cache-dir",
        str(tmp_path / "disk"),
        "--compile-cache-dir",
        str(tmp_path / "compiled"),
    ]
    prompts = [[random.Random(name).randrange(256) for _ in range(100 + name)] for name in range(6)]

    def ask(server: ServeProcess, prompt: list[int]) -> tuple[str, int]:
        answer = server.post("/v1/completions", prompt=prompt, max_tokens=8, temperature=0)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with (
        ServeProcess(tmp_path / "model", *flags, "--dp-size", "2") as server,
        ThreadPoolExecutor(len(prompts)) as clients,
    ):
        first = list(clients.map(lambda prompt: ask(server, prompt), prompts))
        again = [ask(server, prompt) for prompt in prompts]
        assert [text for text, _ in again] == [text for text, _ in first]
        assert [cached for _, cached in again] == [96] * len(prompts)
        metrics = server.metrics()
        spread = [metrics[f'tierax_replica_cache_query_tokens_total{{replica="{i}"}}'] for i in (0, 1)]
        assert min(spread) > 0
        assert sum(spread) == metrics["tierax_cache_query_tokens_total"] == 2 * sum(map(len, prompts))
        assert metrics["tierax_disk_cache_servers"] == 2
        assert any("for each of 2 copies of the model" in line for line in server.said)
        assert server.stop() == 0
    with ServeProcess(tmp_path / "model", *flags) as server:
        later = [ask(server, prompt) for prompt in prompts]
        assert later == [(text, 96) for text, _ in first]
        assert server.stop() == 0


def test_settings_of_copies() -> None:
    several = EngineConfig.create("demo", dp_size=4, host_cache_size="8GiB", host_disk_cache_dir="d")
    assert several.disk_cache_shared, "to each copy the others are servers that write there"
    assert not EngineConfig.create("demo", host_disk_cache_dir="d").disk_cache_shared
    assert several.host_cache_bytes(1 << 40, 1 << 30) == 2 << 30
    share = EngineConfig.create("demo", dp_size=2, host_cache_size="50%")
    assert share.host_cache_bytes(1 << 40, 1 << 30) == 1 << 38
    times = EngineConfig.create("demo", dp_size=2, host_cache_size="2x")
    assert times.host_cache_bytes(1 << 40, 1 << 30) == 2 << 30
    with pytest.raises(ConfigError, match="dp_size: 0 must be a whole number of at least 1"):
        EngineConfig.create("demo", dp_size=0)
    with pytest.raises(ConfigError, match="dp_size: 2 copies of the model are for one process"):
        EngineConfig.create(
            "demo", dp_size=2, num_processes=2, tp_size=2, coordinator_address="localhost:1234"
        )


def test_more_copies_than_devices_are_told_with_the_numbers() -> None:
    model = ModelConfig.__new__(ModelConfig)
    with pytest.raises(ConfigError, match=r"dp_size: 2 copies take 2 devices, but jax finds 1 \(cpu\)"):
        place_replica(0, 2, 1, model)


def test_copies_on_a_cpu_share_its_memory() -> None:
    (total, _), (part, _) = device_memory(), device_memory(copies=4)
    assert part == total // 4
    assert device_memory(copies=2, to_come=total)[1] == 0
