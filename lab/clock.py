"""Simulated time."""

from __future__ import annotations


class SimClock:
    """Seconds that pass only when the simulation says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, time: float) -> None:
        """Time never runs backwards."""
        self.now = max(self.now, time)
