"""How steady is the first token when the disk is not? The three prefetch policies over the same late reads."""

from __future__ import annotations

import random
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .cache_engine import EngineMaker, PageSize
from .jitter_store import Jitter, JitterStore
from .targets import Target

POLICIES = ("best_effort", "wait_complete", "timeout=300ms")


def measure_jitter(
    maker: EngineMaker,
    page: PageSize,
    *,
    prompts: int = 20,
    tokens: int = 384,
    jitter: Jitter | None = None,
    disk_parent: Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Stores random prompts, then lets an engine of each policy find them on disk, one at a time.

    `prefetch`: a row per policy with mean and standard deviation of the TTFT in ms and the share that came from disk.
    """
    jitter = jitter or Jitter(seed=seed)
    rng = random.Random(seed)
    texts = [rng.choices(range(page.vocab_size // 2, page.vocab_size), k=tokens) for _ in range(prompts)]
    room = page.pool_bytes(4 * tokens)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tierax-bench-", dir=disk_parent) as directory:
        cache = {"device_cache_size": room, "host_cache_size": room, "host_disk_cache_dir": directory}
        with maker.open(**cache) as driver:
            for text in tqdm(texts, desc="filling the disk", unit="prompt", disable=not maker.progress):
                driver.answer(text)
            driver.settle()
        for policy in POLICIES:
            wrap = partial(JitterStore, jitter=jitter)
            with maker.open(**cache, prefetch_policy=policy, wrap_store=wrap) as driver:
                times, cached = [], 0
                for text in tqdm(texts, desc=policy, unit="prompt", disable=not maker.progress):
                    request = driver.answer(text)
                    assert request.first_token is not None
                    times.append(1e3 * (request.first_token - request.arrival))
                    cached += request.cached_tokens
                    # Reads that nobody waits for any more must not hasten the next prompt, nor hold it up.
                    driver.settle()
            rows.append(
                {
                    "policy": policy,
                    "ttft_ms_mean": statistics.fmean(times),
                    "ttft_ms_stddev": statistics.pstdev(times),
                    "ttft_ms": times,
                    "hit_rate": cached / (tokens * prompts),
                }
            )
    return {"prefetch": rows}


def jitter_targets(report: dict[str, Any]) -> list[Target]:
    deviation = {row["policy"]: row["ttft_ms_stddev"] for row in report["prefetch"]}
    ratio = deviation["timeout=300ms"] / deviation["wait_complete"]
    return [Target("timeout=300ms / wait_complete: deviation of TTFT", ratio, "<=", 0.4)]
