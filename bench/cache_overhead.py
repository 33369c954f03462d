"""What the lower tiers cost when nothing ever repeats: throughput of random prompts with them and without, in turn."""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .bounds import Clock
from .cache_engine import Driver, EngineMaker, PageSize
from .targets import Target

WARM_UP = 4
"""Bursts until both tiers are full: then the host's rows, three bursts of them, are memory that has been touched before."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are sent at once."""

    requests: int = 4
    prompt_tokens: int = 768
    answer_tokens: int = 32

    @property
    def tokens(self) -> int:
        return self.requests * (self.prompt_tokens + self.answer_tokens)


def measure_overhead(
    maker: EngineMaker,
    page: PageSize,
    *,
    burst: Burst | None = None,
    repeats: int = 4,
    disk_parent: Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Two engines side by side, of which one works at a time; prompt and output tokens per second of each.

    Writes that are left when a burst's last answer is there are waited for before the other engine's turn; they are told of
    as `drain_s`.
    """
    burst = burst or Burst()
    rng = random.Random(seed)
    # Smaller than two bursts, so that the device tier evicts as it would after hours; the host's is of three.
    device = page.pool_bytes(burst.tokens * 3 // 2)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    drains: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tierax-bench-", dir=disk_parent) as directory:
        lower = {"host_cache_size": 2 * device, "host_disk_cache_dir": directory}
        with (
            maker.open(device_cache_size=device, host_cache_size=0) as off,
            maker.open(device_cache_size=device, **lower) as on,
        ):
            drivers = {"off": off, "on": on}
            for _ in range(WARM_UP):
                for driver in drivers.values():
                    _run(driver, burst, page.vocab_size, rng, maker.clock)
                    driver.settle()
            for _ in tqdm(range(repeats), desc="nothing repeats", unit="pair", disable=not maker.progress):
                for name, driver in drivers.items():
                    rates[name].append(burst.tokens / _run(driver, burst, page.vocab_size, rng, maker.clock))
                    started = maker.clock()
                    driver.settle()
                    if name == "on":
                        drains.append(maker.clock() - started)
    losses = [1 - on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "no_repeats": {
            "tok_s_off": statistics.median(rates["off"]),
            "tok_s_on": statistics.median(rates["on"]),
            "loss": statistics.median(losses),
            "losses": losses,
            "drain_s": statistics.median(drains),
        }
    }


def overhead_targets(report: dict[str, Any]) -> list[Target]:
    loss = report["no_repeats"]["loss"]
    return [Target("throughput lost to the tiers when nothing repeats", loss, "<=", 0.03, percent=True)]


def _run(driver: Driver, burst: Burst, vocab_size: int, rng: random.Random, clock: Clock) -> float:
    """Seconds until all of a burst is answered."""
    prompts = [
        rng.choices(range(vocab_size // 2, vocab_size), k=burst.prompt_tokens) for _ in range(burst.requests)
    ]
    started = clock()
    driver.finish([driver.send(prompt, burst.answer_tokens) for prompt in prompts])
    return clock() - started
