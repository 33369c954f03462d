"""Measured rates, for choosing between loading a page and computing it again."""

from __future__ import annotations

import math
from dataclasses import dataclass

DOUBTED = 0.001
"""Weight of what is known beside a trial."""
TRIAL = 0.01
"""Share of the time between two trials of a slow disk that a trial should take."""


class Rate:
    """Amount per second, of late: old measurements lose half of their weight with every `memory` seconds of new ones."""

    def __init__(self, memory: float = 2.0) -> None:
        self._memory = memory
        self._amount = 0.0
        self._seconds = 0.0
        self.measured_at: float | None = None

    def measure(self, amount: float, seconds: float, now: float) -> None:
        """`amount` took `seconds`, none at all included, and was seen to be done at `now`."""
        if seconds < 0 or amount <= 0:
            return
        keep = 0.5 ** (seconds / self._memory)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds
        self.measured_at = now

    def doubt(self) -> None:
        """What is known so far counts for next to nothing beside the next measurement."""
        self._amount *= DOUBTED
        self._seconds *= DOUBTED

    def seconds_for(self, amount: float) -> float | None:
        """How long `amount` should take; None if nothing is known."""
        return amount * self._seconds / self._amount if self._amount > 0 else None


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a prefix that follow each other: how many, and the size of each."""

    count: int
    bytes: int
    tokens: int


class LoadOrRecompute:
    """Says how much of a prefix to read from the disk, where what is not read is prefilled.

    The disk has its queue, and so has the device: what arrives while a request waits for its turn anyway costs it nothing,
    however slow the disk is, and a fast disk with a long queue may come too late. What was too slow once is tried
    again after `retry` seconds, since only a load can tell that loads are fast again.
    """

    def __init__(self, retry: float = 10.0) -> None:
        self.prefill = Rate()
        """Tokens per second."""
        self.read = Rate()
        """Bytes per second, disk to host."""
        self._retry = retry
        self._tried_at = -math.inf
        """When the last trial began: one that stalls keeps nobody from the next."""

    def turn(self, tokens: int) -> float:
        """Seconds until a request can be computed that comes after so many tokens of others."""
        return self.prefill.seconds_for(tokens) or 0.0

    def pages_to_read(self, pages: Pages, *, reading: int, turn: float, now: float) -> int:
        """How many of them, from the first on, should be read; more than none may be a trial.

        `reading`: pages that the disk has been asked for before. `turn`: seconds until the request can be computed.
        """
        load, compute = self.read.seconds_for(pages.bytes), self.prefill.seconds_for(pages.tokens)
        if load is None or compute is None:
            return pages.count
        wait = turn - reading * load
        if load <= compute and pages.count * (compute - load) + wait >= 0:
            return pages.count
        if wait >= load:
            return min(int(wait / load), pages.count)
        assert self.read.measured_at is not None
        if now - max(self.read.measured_at, self._tried_at) < self._retry:
            return 0
        self._tried_at = now
        self.read.doubt()
        return min(max(int(TRIAL * self._retry / load), 1), pages.count)

    def worth_asking(self, questions: Rate, num_tokens: int, now: float) -> bool:
        """Whether to ask the disk for tokens that it may have: that should not take longer than computing them."""
        ask, compute = questions.seconds_for(1), self.prefill.seconds_for(num_tokens)
        if ask is None or compute is None or ask <= compute:
            return True
        assert questions.measured_at is not None
        return now - questions.measured_at >= self._retry
