"""Time to the first token of one prompt, by where its KV is when it comes again."""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..engine.request import Request
from .cache_engine import EngineMaker, PageSize
from .raw_io import files_below, make_cold, memcpy_seconds, pread_seconds
from .targets import Target

PLACES = ("cold", "device", "host", "disk", "disk_warm")
"""`disk`: dropped from the system's file cache; `disk_warm`: files that it still holds."""


def measure_ttft(
    maker: EngineMaker,
    page: PageSize,
    *,
    tokens: int = 1900,
    repeats: int = 5,
    disk_parent: Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Medians over `repeats` random prompts, each sent cold and then again from every place.

    `ttft_ms` by place; `ttft`: recomputed tokens by place, and the plain copies and reads of the same bytes.
    """
    rng = random.Random(seed)
    room = page.pool_bytes(2 * tokens)
    times: dict[str, list[float]] = {place: [] for place in PLACES}
    recomputed: dict[str, int] = dict.fromkeys(PLACES, 0)
    reads: dict[str, list[float]] = {"disk": [], "disk_warm": []}
    stored: list[int] = []

    with tempfile.TemporaryDirectory(prefix="tierax-bench-", dir=disk_parent) as name:
        directory = Path(name)
        cache = {"device_cache_size": room, "host_cache_size": room, "host_disk_cache_dir": name}
        with maker.open(**cache, prefetch_policy="wait_complete") as driver:
            for _ in tqdm(range(repeats), desc="first tokens", unit="prompt", disable=not maker.progress):
                prompt = rng.choices(range(page.vocab_size // 2, page.vocab_size), k=tokens)
                before = files_below(directory)

                def send(place: str, prompt: list[int] = prompt) -> None:
                    request = driver.answer(prompt)
                    times[place].append(_ttft(request))
                    # What another tier supplied would be no figure of this one.
                    tier = place.removesuffix("_warm")
                    if place != "cold" and request.cached_by_tier[tier] != request.cached_tokens:
                        raise RuntimeError(f"sent again from {place}, but found in {request.cached_by_tier}")
                    recomputed[place] = max(recomputed[place], request.num_prompt - request.cached_tokens)

                send("cold")
                driver.settle()
                files = sorted(
                    file for file in files_below(directory) - before if file.stat().st_size >= page.bytes
                )
                stored.append(sum(file.stat().st_size for file in files))
                send("device")
                driver.forget("device")
                send("host")
                driver.forget("device", "host")
                send("disk_warm")
                reads["disk_warm"].append(pread_seconds(files, maker.clock))
                driver.forget("device", "host")
                make_cold(files)
                send("disk")
                make_cold(files)
                reads["disk"].append(pread_seconds(files, maker.clock))

    copied = tokens // page.tokens * page.bytes
    return {
        "ttft_ms": {place: 1e3 * statistics.median(values) for place, values in times.items()},
        "ttft": {
            "tokens": tokens,
            "all_ms": {place: [1e3 * value for value in values] for place, values in times.items()},
            "page_tokens": page.tokens,
            "recomputed_tokens": recomputed,
            "bytes": copied,
            "bytes_on_disk": statistics.median(stored),
            "memcpy_ms": 1e3 * memcpy_seconds(copied, maker.clock),
            "pread_ms": {place: 1e3 * statistics.median(values) for place, values in reads.items()},
        },
    }


def ttft_targets(report: dict[str, Any]) -> list[Target]:
    """No tier may cost much more than moving its bytes."""
    ttft, detail = report["ttft_ms"], report["ttft"]
    copy, device = 2.5 * detail["memcpy_ms"], ttft["device"]
    again = max(tokens for place, tokens in detail["recomputed_tokens"].items() if place != "cold")
    targets = [
        Target("recomputed tokens of a prompt sent again", again, "<=", detail["page_tokens"] + 1),
        Target("device / cold: TTFT", device / ttft["cold"], "<=", 0.05, percent=True),
        Target("host: TTFT ms, against device + 2.5 memcpy", ttft["host"], "<=", device + copy),
    ]
    for place, label in (("disk", "disk"), ("disk_warm", "disk, files in memory")):
        limit = device + 1.25 * detail["pread_ms"][place] + copy
        name = f"{label}: TTFT ms, against device + 1.25 pread + 2.5 memcpy"
        targets.append(Target(name, ttft[place], "<=", limit))
    return targets


def _ttft(request: Request) -> float:
    assert request.first_token is not None
    return request.first_token - request.arrival
