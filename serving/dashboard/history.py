"""What the dashboard draws over time: a point a second of the last quarter of an hour, kept by the server itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...engine.stats import EngineStats

STEP = 1.0
"""Seconds between points."""
POINTS = 900

COLUMNS = ("seconds", "output", "computed", "cached", "ttft_p50", "ttft_p95", "running", "waiting")
Point = tuple[float, float, float, float, float | None, float | None, int, int]
"""As `COLUMNS`: seconds since the start; tokens a second, generated, computed of prompts and found in the cache; seconds
to the first token, None where there was none; requests."""


@dataclass(frozen=True, slots=True)
class _Counts:
    at: float
    generated: int
    prompt: int
    cached: int


class History:
    """A ring of points. `clock` gives seconds, monotonic; `take_first_tokens` the latest times to a first token."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        take_first_tokens: Callable[[], list[float]],
        clock: Callable[[], float],
    ) -> None:
        self._stats = stats
        self._take = take_first_tokens
        self._clock = clock
        self._started = clock()
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._number = 0
        self._last = self._count()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._started

    @property
    def number(self) -> int:
        """How many points there have been; the latest has this number."""
        return self._number

    def sample(self) -> None:
        """Adds a point about the time since the last one."""
        counts, last, stats = self._count(), self._last, self._stats()
        elapsed = counts.at - last.at
        if elapsed <= 0:
            return
        times = sorted(self._take())
        cached = counts.cached - last.cached
        self._points.append(
            (
                round(counts.at - self._started, 2),
                round((counts.generated - last.generated) / elapsed, 2),
                round((counts.prompt - last.prompt - cached) / elapsed, 2),
                round(cached / elapsed, 2),
                _quantile(times, 0.5),
                _quantile(times, 0.95),
                stats.running,
                stats.waiting,
            )
        )
        self._number += 1
        self._last = counts

    def since(self, number: int) -> list[Point]:
        """The points after the one with this number, as far as they are still there; 0 for all."""
        new = min(max(self._number - number, 0), len(self._points))
        points = list(self._points)
        return points[len(points) - new :]

    def _count(self) -> _Counts:
        stats = self._stats()
        return _Counts(self._clock(), stats.generated_tokens, stats.prompt_tokens, stats.cached_tokens)


def _quantile(ordered: list[float], share: float) -> float | None:
    """The value that this share of the values does not exceed."""
    return round(ordered[math.ceil(share * len(ordered)) - 1], 5) if ordered else None
