"""What a mover is made of: the two ends that it copies between, and what it passes from thread to thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .copy_order import Job, Ticket
from .moves import Outcome
from .page_keys import PageKey


class Gathering(Protocol):
    """Pages on their way from the device; see `DevicePool.gather`."""

    def is_ready(self) -> bool: ...
    def rows(self) -> np.ndarray: ...
    def release(self) -> None: ...
    def abandon(self) -> None: ...


class Device(Protocol):
    """What the mover needs of a `DevicePool`."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def bytes_held(self) -> int: ...

    batch_pages: int

    def gather(self, pages: Sequence[int]) -> Gathering | None: ...
    def take_staging(self) -> Any: ...
    def upload(self, staging: Any, count: int) -> None: ...
    def scatter(self, staging: Any, pages: Sequence[int]) -> None: ...
    def give_back(self, staging: Any) -> None: ...


class Records(Protocol):
    """What the mover needs of `PageRecords`: all but `pack` return at once and call `done` exactly once, in any thread."""

    @property
    def row_bytes(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    def read(self, key: PageKey, row: int, into: memoryview, done: Callable[[Outcome], None]) -> None: ...
    def pack(self, key: PageKey, row: memoryview) -> bytes: ...
    def write(self, key: PageKey, record: bytes, done: Callable[[Outcome], None]) -> None: ...
    def give_up(self, key: PageKey) -> None: ...
    def delete(self, key: PageKey, done: Callable[[Outcome], None]) -> None: ...


class Lane:
    """Jobs for the store, in order; `in_flight` stays within `limit`, except for a single job that is larger."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self.waiting: deque[tuple[Job, int]] = deque()

    def next(self) -> Job | None:
        """The next job that may be handed to the store; who takes it subtracts its size again at its end."""
        if not self.waiting or (self.in_flight and self.in_flight + self.waiting[0][1] > self.limit):
            return None
        job, size = self.waiting.popleft()
        self.in_flight += size
        return job


class Result(NamedTuple):
    """What became of some pages of a movement, until `poll` tells."""

    ticket: Ticket
    first: int
    outcomes: Sequence[Outcome]
    seconds: float | None
    """Time of this copy; None for what was not copied."""
    ended: float
    rows: Sequence[int] = ()


class Staged(NamedTuple):
    """Pages in a staging buffer, until `poll` scatters them."""

    job: Job
    staging: Any
    good: Sequence[int]
    """Which of the job's pages are in there."""
    seconds: float
