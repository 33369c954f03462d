"""Measured rates, for choosing between loading a page and computing it again."""

from __future__ import annotations


class Rate:
    """Amount per second, of late: old measurements lose half of their weight with every `memory` seconds of new ones."""

    def __init__(self, memory: float = 2.0) -> None:
        self._memory = memory
        self._amount = 0.0
        self._seconds = 0.0
        self.measured_at: float | None = None

    def measure(self, amount: float, seconds: float, now: float) -> None:
        """`amount` took `seconds`, and was seen to be done at `now`."""
        if seconds <= 0 or amount <= 0:
            return
        keep = 0.5 ** (seconds / self._memory)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds
        self.measured_at = now

    def seconds_for(self, amount: float) -> float | None:
        """How long `amount` should take; None if nothing is known."""
        return amount * self._seconds / self._amount if self._amount > 0 else None


class LoadOrRecompute:
    """Says whether reading from the disk is expected to be faster than prefilling the same tokens.

    What was slow once is tried again after `retry` seconds, since only a load can tell that loads are fast again.
    """

    def __init__(self, retry: float = 10.0) -> None:
        self.prefill = Rate()
        """Tokens per second."""
        self.read = Rate()
        """Bytes per second, disk to host."""
        self._retry = retry

    def worth_reading(self, num_bytes: int, num_tokens: int, now: float) -> bool:
        load, compute = self.read.seconds_for(num_bytes), self.prefill.seconds_for(num_tokens)
        if load is None or compute is None or load <= compute:
            return True
        assert self.read.measured_at is not None
        return now - self.read.measured_at >= self._retry

    def worth_asking(self, questions: Rate, num_tokens: int, now: float) -> bool:
        """Whether to ask the disk for tokens that it may have: that should not take longer than computing them."""
        ask, compute = questions.seconds_for(1), self.prefill.seconds_for(num_tokens)
        if ask is None or compute is None or ask <= compute:
            return True
        assert questions.measured_at is not None
        return now - questions.measured_at >= self._retry
