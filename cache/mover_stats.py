"""What a mover has done: counters that only grow, so that any thread may read them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from .moves import Outcome

LATENCY_BOUNDS_MS = (
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1000.0,
    2500.0,
    10000.0,
)
"""Upper bounds of the latency buckets; one more has no bound."""
KINDS = ("save", "load", "read", "write")


@dataclass(slots=True)
class KindStats:
    """Counters of one kind of movement. Pages, bytes and seconds count what arrived."""

    moves: int = 0
    """Movements that ended, well or not."""
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Sum of the `Move.seconds` of movements that ended."""
    failures: dict[Outcome, int] = field(
        default_factory=lambda: {outcome: 0 for outcome in Outcome if outcome is not Outcome.OK}
    )
    """Pages by what kept them from arriving."""
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_MS) + 1))
    """By bucket: single copies, of a batch for save and load, of a page for read and write. Each in one bucket only."""
    latency_ms: float = 0.0
    """Sum of the latencies."""

    def observe(self, seconds: float) -> None:
        """Counts one copy."""
        self.latency_counts[bisect_left(LATENCY_BOUNDS_MS, seconds * 1e3)] += 1
        self.latency_ms += seconds * 1e3


@dataclass(frozen=True, slots=True)
class MoverStats:
    """By kind of movement: `save`, `load`, `read`, `write`."""

    kinds: Mapping[str, KindStats] = field(default_factory=lambda: {kind: KindStats() for kind in KINDS})

    @property
    def save(self) -> KindStats:
        return self.kinds["save"]

    @property
    def load(self) -> KindStats:
        return self.kinds["load"]

    @property
    def read(self) -> KindStats:
        return self.kinds["read"]

    @property
    def write(self) -> KindStats:
        return self.kinds["write"]
