"""How likely what was used comes back, by kind and age, and what keeping it is worth."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from math import log
from typing import Any, Protocol

import numpy as np

from .hazard_prior import COUNTS, PRIOR_WEIGHT

RATIO = 1.6
EDGES = (0.0, *(RATIO**i for i in range(23)))
"""Seconds at which an age's bins begin."""
BINS = len(EDGES)
WIDTHS = (*(after - before for before, after in pairwise(EDGES)), EDGES[-1] * (RATIO - 1))
FIRST_GUESS, GUESS_WEIGHT = 0.02, 5.0
"""Share that comes back in a bin, where nothing is known: as heavy a tail as that gives recency its due."""
GROUP_WEIGHT, KIND_WEIGHT = 10.0, 20.0
"""Lives that the wider group's rate counts for in a narrower one, at least."""
EVENTS = 1.0
"""Returns that it counts for, at least: where they are rare, a kind without any has said nothing of its own so far."""
STEP = 0.3
LIVES_BETWEEN = 128
"""Lives between two looks at the counts."""
HALF_LIFE = 40_000
"""Lives after which a count has half of its weight."""


class Life(Protocol):
    """Something that was used at `time` (seconds), and of whose `pages` so many are `left`, not used since."""

    time: float
    pages: int
    left: int


class HazardTable:
    """Counts, for `kinds` kinds and one more beside them, who came back in a bin and who passed it without.

    Kinds lie in groups of `group`; a kind's rate leans on that of its group, and that on everyone's.
    """

    def __init__(self, kinds: int, group: int) -> None:
        self._kinds, self._group = kinds, group
        self._back = np.zeros((kinds + 1, BINS))
        self._passed = np.zeros((kinds + 1, BINS))
        self._waiting: list[deque[Any]] = [deque() for _ in range(BINS)]
        """Lives by the bin that they are in, oldest first."""
        self._lives = 0
        self._index: list[list[float]] = []
        self._judge()

    def load_prior(self) -> None:
        """Starts with what other traces taught, at a fraction of its weight."""
        for kind, (back, passed) in COUNTS.items():
            self._back[kind, : len(back)] = back
            self._passed[kind, : len(passed)] = passed
        self._back *= PRIOR_WEIGHT
        self._passed *= PRIOR_WEIGHT
        self._judge()

    def add(self, life: Life) -> None:
        """A life that begins now."""
        self._waiting[0].append(life)
        self._lives += 1
        if self._lives % LIVES_BETWEEN == 0:
            self._judge()
            self._back *= 0.5 ** (LIVES_BETWEEN / HALF_LIFE)
            self._passed *= 0.5 ** (LIVES_BETWEEN / HALF_LIFE)

    def event(self, kind: int, age: float, share: float) -> None:
        """A share of a life ends at an age of so many seconds: it came back."""
        self._back[kind, bisect_right(EDGES, age) - 1] += share

    def advance(self, now: float, kind: Callable[[Any], int]) -> None:
        """Moves lives on into the bins that they are in by now."""
        for at, lives in enumerate(self._waiting):
            if not lives:
                continue
            due = now - EDGES[at] - WIDTHS[at]
            while lives and lives[0].time <= due:
                life = lives.popleft()
                if life.left:
                    self._passed[kind(life), at] += life.left / life.pages
                    if at + 1 < BINS:
                        self._waiting[at + 1].append(life)

    def index(self, kind: int, age: float, worth: float = 1.0) -> int:
        """The most that keeping it can bring from this age on: pages used again, per page and second kept, in whole
        `STEP`s of its logarithm, since finer differences are noise. `worth`: of one page, beside others of its path.
        """
        at = bisect_right(EDGES, age) - 1
        row = self._index[kind]
        share = min((age - EDGES[at]) / WIDTHS[at], 1.0)
        return int(log(worth * (row[at] * (1 - share) + row[min(at + 1, BINS - 1)] * share)) / STEP)

    def _judge(self) -> None:
        back, passed = self._back[: self._kinds], self._passed[: self._kinds]
        groups = (-1, self._group, BINS)
        whole = _rates(back.sum(axis=0), passed.sum(axis=0), FIRST_GUESS, GUESS_WEIGHT)
        group = _rates(
            back.reshape(groups).sum(axis=1), passed.reshape(groups).sum(axis=1), whole, GROUP_WEIGHT
        )
        beside = np.minimum(2 * whole, 0.9)
        leaning_on = np.vstack([np.repeat(group, self._group, axis=0), beside])
        self._index = _indices(_rates(self._back, self._passed, leaning_on, KIND_WEIGHT)).tolist()


def _rates(back: np.ndarray, passed: np.ndarray, guess: np.ndarray | float, weight: float) -> np.ndarray:
    """Along the last axis, by bin: the share of what gets there that comes back in it."""
    lives = np.maximum(weight, EVENTS / guess)
    return (back + lives * guess) / (back + passed + lives)


def _indices(rates: np.ndarray) -> np.ndarray:
    """By kind and bin: the best ratio of hits to seconds over all the ages up to which one could go on keeping."""
    indices = np.empty_like(rates)
    for start in range(BINS):
        ahead = rates[:, start:]
        alive = np.cumprod(1 - ahead, axis=1)
        before = np.hstack([np.ones((len(rates), 1)), alive[:, :-1]])
        seconds = np.cumsum(before * (1 - ahead / 2) * WIDTHS[start:], axis=1)
        indices[:, start] = ((1 - alive) / seconds).max(axis=1)
    return indices
