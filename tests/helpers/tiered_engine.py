"""The fake engine of server tests over the real loop and three real tiers, on a fake device in real time."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tierax.cache.mover_stats import MoverStats
from tierax.engine.config import EngineConfig
from tierax.engine.prefetch_policy import PrefetchPolicy

from .fake_engine import FakeEngine
from .fake_executor import ManualClock
from .tiered_rig import PAGE_BYTES, TieredRig


class RealClock(ManualClock):
    """Seconds that pass by themselves, whatever the fake device thinks."""

    @property
    def now(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return time.monotonic()

    @now.setter
    def now(self, _: float) -> None:
        pass


class TieredEngine(FakeEngine):
    """Stands for `Engine` beneath a real `EngineThread`: pages of 4 tokens, of which every byte is one.

    `rig` has the tiers and their knobs (delays, faults); `store` outlives the engine.
    """

    def __init__(self, *, prefetch: str = "wait_complete", **rig: Any) -> None:
        super().__init__(context_length=1024)
        self.rig = TieredRig(clock=RealClock(), prefetch=prefetch, **rig)
        self.clock = time.monotonic
        self.loop = self.rig.loop
        self.stats = self.rig.loop.stats
        self.cache = self.rig.cache
        self.page_bytes = PAGE_BYTES
        self.config = EngineConfig(model_path="fake", host_cache_size=max(rig.get("host_pages", 32), 0))
        # What a real mover counts, a fake one does not: tests fill this in.
        self.mover_stats = MoverStats()
        self.rig.mover.stats = self.mover_stats  # pyright: ignore[reportAttributeAccessIssue]
        self.descriptions: dict[bytes, dict[str, str]] = {}
        store = SimpleNamespace(
            url="memory://",
            read_only=False,
            free_bytes=lambda: 10**9,
            papers=SimpleNamespace(description=lambda name: self.descriptions.get(name, {})),
        )
        self.tiers = SimpleNamespace(
            index=self.rig.index,
            store=store if self.rig.index is not None else None,
            mover=self.rig.mover,
            fleet=None,
            transfers=SimpleNamespace(prefetcher=self.rig.prefetcher, writer=self.rig.writer),
        )
        self.warm_gate: Callable[[], None] = lambda: None
        self.drain_left: float | None = None

    def warm_up(self, *, stopped: Callable[[], bool]) -> None:
        self.warm_gate()

    def close(self, drain_timeout: float) -> None:
        self.drain_left = drain_timeout

    def policy_of(self, index: int) -> PrefetchPolicy | None:
        """How long the request that was made at this place waits for the disk."""
        return self.made[index].prefetch
