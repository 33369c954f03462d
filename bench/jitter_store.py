"""A page store whose reads come late now and then, as on a busy disk or a network: the same ones in every run."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Jitter:
    """Delays of single reads, in seconds."""

    usual: float = 0.002
    stall_share: float = 0.02
    """Of the reads."""
    stall: tuple[float, float] = (1.0, 7.0)
    """Shortest and longest; uniform between."""
    seed: int = 0

    def delay(self, name: bytes) -> float:
        """Of a page: every read of it takes as long."""
        rng = random.Random(name + self.seed.to_bytes(8, "little"))
        return rng.uniform(*self.stall) if rng.random() < self.stall_share else self.usual


class JitterStore:
    """All of a page store's interface; a read has ended after the page's delay only."""

    def __init__(self, store: Any, jitter: Jitter, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._jitter = jitter
        self._clock = clock
        self._late: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._closed = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._deliver, name="late reads", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read_into(self, key: Any, buffers: Sequence[memoryview], done: Callable[[Any], None]) -> None:
        """As the store's, but later; reads do not wait for each other."""
        due = self._clock() + self._jitter.delay(key.key)

        def arrived(outcome: Any) -> None:
            with self._news:
                self._count += 1
                heapq.heappush(self._late, (due, self._count, lambda: done(outcome)))
                self._news.notify()

        self._store.read_into(key, buffers, arrived)

    def close(self, *args: Any, **options: Any) -> Any:
        """Hands over at once what is late, and closes the store."""
        result = self._store.close(*args, **options)
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()
        return result

    def _deliver(self) -> None:
        while True:
            with self._news:
                while not self._late or (not self._closed and self._late[0][0] > self._clock()):
                    if self._closed:
                        return
                    self._news.wait(max(0.0, self._late[0][0] - self._clock()) if self._late else None)
                _, _, hand_over = heapq.heappop(self._late)
            hand_over()
