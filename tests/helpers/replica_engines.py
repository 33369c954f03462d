"""Runs a model in several copies, on virtual devices, and prints what they say and where they found it.

A program of its own (`python -m helpers.replica_engines JSON`): the number of devices is fixed when jax starts.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers.split_engine import GREEDY, SAMPLED, Place
from tierax import LLM
from tierax.engine.config import ConfigError

PROMPTS = [[random.Random(name).randrange(256) for _ in range(24 + 16 * name)] for name in range(4)]
NEXT_TURN = [*range(40, 47)]
"""Lengths that make steps of 8 tokens and of one, so that two programs are compiled for them."""


def run(case: dict[str, Any]) -> list[dict[str, Any]]:
    """case: `copies` (a list of numbers of them), `devices` of each, `sampled`, `warm` (prepared for all, twice)."""
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory), "llama-bias", "f32")
        if case.get("warm"):
            return [warm(place, case["copies"][0], case["devices"]) for _ in range(2)]
        return [one(place, copies, case["devices"], case.get("sampled", False)) for copies in case["copies"]]


def warm(place: Place, copies: int, devices: int) -> dict[str, Any]:
    """What is compiled at start, and behind that."""
    config = place.config(devices, disk=False, dp_size=copies)
    config = dataclasses.replace(config, skip_warmup=False, max_num_batched_tokens=4)
    with LLM(config, use_tqdm=False) as llm:
        before = llm.stats
        llm.generate([*PROMPTS, *PROMPTS], [GREEDY, SAMPLED] * len(PROMPTS), use_tqdm=False)
        after = llm.stats
        return {
            "programs": after.warm_programs,
            "compiled": before.compiles,
            "loaded": before.loaded_programs,
            "later": after.compiles - before.compiles,
        }


def one(place: Place, copies: int, devices: int, sampled: bool) -> dict[str, Any]:
    # Each place of a disk cache is for one run: what the others left would be found.
    disk = place.model.parent / f"disk-{copies}"
    config = place.config(devices, disk=False, dp_size=copies)
    options = {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "model_path"}
    options |= {"host_disk_cache_dir": str(disk), "device_cache_size": 3 * config.device_cache_size}
    with LLM(config.model_path, use_tqdm=False, **options) as llm:
        first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        turns = [[*out.prompt_token_ids, *out.token_ids, *NEXT_TURN] for out in first]
        second = llm.generate(turns, GREEDY, use_tqdm=False)
        drawn = llm.generate(PROMPTS[:2], SAMPLED, use_tqdm=False) if sampled else []
        threads = [] if llm._replicas is None else llm._replicas.replicas
        engines = [thread.engine for thread in threads] or [llm.engine]
        for engine in engines:
            engine.cache.check()
        return {
            "errors": [out.error for out in (*first, *second, *drawn) if out.error],
            "tokens": [[out.token_ids for out in outs] for outs in (first, second, drawn)],
            "cached": [out.cached_tokens for out in second],
            "cached_on_device": [out.cached_by_tier["device"] for out in second],
            "prompt_tokens": [engine.stats.prompt_tokens for engine in engines],
            "total": llm.stats.prompt_tokens,
            "devices": [[device.id for device in engine.device.placement.local] for engine in engines],
            "pools": [sorted(d.id for d in engine.device.pool.array.devices()) for engine in engines],
            "pages": [[engine.cache.num_pages, engine.cache.host.num_pages] for engine in engines],
            "servers": [
                engine.tiers.fleet.fleet.stats.replicas
                for engine in engines
                if engine.tiers is not None and engine.tiers.fleet is not None
            ],
        }


def refused(copies: int, devices: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory), "llama-bias", "f32")
        try:
            LLM(place.config(devices, disk=False, dp_size=copies), use_tqdm=False)
        except ConfigError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps({"runs": run(given), "refused": refused(3, 2) if given["devices"] == 2 else ""}))
