"""Runs whole engines over one disk cache, each with the model on another number of devices, and prints what they answer.

A program of its own (`python -m helpers.split_engine JSON`): the number of devices is fixed when jax starts.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, SamplingParams
from tierax.cache.device_pool import DevicePool
from tierax.engine.config import EngineConfig
from tierax.engine.follower import follow
from tierax.models.config import ModelConfig
from tierax.models.sharding import split_heads
from tierax.models.source import resolve_model

PAGE = 8
CONTEXT = 96
POOL_PAGES = 30
HOST_PAGES = 14
"""Both are less than what the prompts come to."""
PROMPTS = [[random.Random(name).randrange(256) for _ in range(20 + 13 * name)] for name in range(5)]
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=9,
    temperature=0.8,
    top_p=0.9,
    seed=3,
    ignore_eos=True,
    presence_penalty=0.5,
    logprobs=2,
    prompt_logprobs=1,
)


class Place:
    """A tiny model, and a disk cache under engines that come and go."""

    def __init__(self, directory: Path, family: str, kv: str) -> None:
        self._directory, self._kv = directory, kv
        self.model = directory / "model"
        self.disk = directory / "disk"
        if not self.model.exists():
            write_tiny_text_model(self.model, family)
        self._config = resolve_model(self.model).config

    def engine(self, devices: int, **options: Any) -> LLM:
        return LLM(self.config(devices, **options), use_tqdm=False)

    def config(
        self,
        devices: int,
        *,
        pool_pages: int = POOL_PAGES,
        host_pages: int = HOST_PAGES,
        disk: bool = True,
        prefetch: str = "wait_complete",
        **options: Any,
    ) -> EngineConfig:
        size = self._page_bytes(devices)
        return EngineConfig(
            model_path=str(self.model),
            tp_size=devices,
            kv_cache_dtype=self._kv,
            page_size=PAGE,
            context_length=CONTEXT,
            max_num_seqs=1,
            max_num_batched_tokens=8,
            device_cache_size=(pool_pages + 1) * size,
            host_cache_size=host_pages * _page_bytes(self._config, self._config.num_kv_heads, self._kv),
            host_disk_cache_dir=str(self.disk) if disk else None,
            prefetch_policy=prefetch,
            compile_cache_dir=str(self._directory / "compiled"),
            skip_warmup=True,
            **options,
        )

    def _page_bytes(self, devices: int) -> int:
        """On each device."""
        _, held = split_heads(self._config.num_heads, self._config.num_kv_heads, devices)
        return _page_bytes(self._config, held.shape[1], self._kv)


def _page_bytes(config: ModelConfig, heads: int, kv: str) -> int:
    row = 2 * config.head_dim + 4 if kv == "fp8" else 4 * 2 * config.head_dim
    return config.num_layers * PAGE * heads * row


def answers(llm: LLM, sampled: bool) -> dict[str, Any]:
    """What an engine says to all prompts, twice, and where it found them the first time."""
    first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    second = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    engine = llm.engine
    assert engine.tiers is not None
    engine.cache.check()
    drawn = llm.generate(PROMPTS[:2], SAMPLED, use_tqdm=False) if sampled else []
    return {
        "errors": [out.error for out in (*first, *second, *drawn) if out.error],
        "greedy": [out.token_ids for out in first],
        "again": [out.token_ids for out in second],
        "by_tier": [out.cached_by_tier for out in first],
        "by_tier_again": [out.cached_by_tier for out in second],
        "sampled": [out.token_ids for out in drawn],
        "scores": [
            entry.logprob for out in drawn for entry in out.prompt_logprobs or [] if entry is not None
        ],
        "evicted": engine.stats.evicted_pages,
        "written": engine.tiers.transfers.writer.stats.written_pages,
        "failed_writes": engine.tiers.transfers.writer.stats.failed_pages,
        "failed_reads": engine.tiers.transfers.prefetcher.stats.failed_pages,
        "page_bytes": engine.page_bytes,
    }


def memory(place: Place, devices: int) -> dict[str, Any]:
    """What the forward's program takes with a pool, and with one that is larger."""
    found = []
    for pages in (POOL_PAGES, 20 * POOL_PAGES):
        with place.engine(devices, pool_pages=pages, disk=False) as llm:
            side = llm.engine.device
            analysis = side.steps.compiled(*side.shapes.pack_empty(1), 1).memory_analysis()
            assert analysis is not None
            shard = side.pool.array.addressable_shards[0].data
            found.append((analysis.alias_size_in_bytes - shard.nbytes, analysis.temp_size_in_bytes))
    return {"not_aliased": [one[0] for one in found], "temp": [one[1] for one in found]}


def run(case: dict[str, Any]) -> list[dict[str, Any]]:
    """case: `family`, `kv`, `devices` (a list), `sampled`, `memory` (a number of devices, or nothing)."""
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory), case["family"], case["kv"])
        results = []
        for devices in case["devices"]:
            with place.engine(devices) as llm:
                results.append(answers(llm, case.get("sampled", False)))
        if case.get("memory"):
            results.append(memory(place, case["memory"]))
        return results


def take_part(directory: Path, devices: int, process: int, processes: int, port: int, mode: str) -> int:
    """One of several processes that run a model in `directory` together; process 0 prints its answers.

    mode: `once`; `forever`: and goes on until it is killed; with a disk cache `disk` (once), `disk-forever` (prompts that are
    new each time), `elsewhere`, where the others than process 0 have another directory, and `disk-late`, where these are
    late with their programs, by more than a request waits for the disk.
    """
    place, disk = Place(directory, "llama-bias", "f32"), mode not in ("once", "forever")
    if mode == "elsewhere" and process:
        place.disk = directory / "elsewhere"
    late = mode == "disk-late"
    if late and process:
        _be_late()
    config = place.config(
        devices,
        prefetch="timeout=2000ms" if late else "wait_complete",
        host_pages=HOST_PAGES if disk else 10 * HOST_PAGES,
        disk=disk,
        coordinator_address=f"127.0.0.1:{port}",
        num_processes=processes,
        process_id=process,
    )
    if process:
        return follow(config)
    with LLM(config, use_tqdm=False) as llm:
        found = answers(llm, sampled=True)
        print(json.dumps(found), flush=True)
        while mode == "forever":
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        more = random.Random(0)
        while mode == "disk-forever":
            llm.generate([[more.randrange(256) for _ in range(60)]], GREEDY, use_tqdm=False)
    return 0


def _be_late() -> None:
    """Each program that copies pages takes this process two seconds more."""
    warm_up = DevicePool.warm_up

    def slow(self: DevicePool) -> Iterator[None]:
        for _ in warm_up(self):
            time.sleep(2)
            yield

    DevicePool.warm_up = slow


if __name__ == "__main__":
    if sys.argv[1] == "--process":
        directory, *numbers, mode = sys.argv[2:]
        devices, process, processes, port = map(int, numbers)
        sys.exit(take_part(Path(directory), devices, process, processes, port, mode))
    print(json.dumps([run(case) for case in json.loads(sys.argv[1])]))
