"""A mover between a device, rows and a store that a test can hold up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from helpers.dict_store import DictStore
from tierax.cache.disk.page_records import PageRecords
from tierax.cache.disk.record import PageLayout
from tierax.cache.disk.share import Share
from tierax.cache.host_pool import HostPool
from tierax.cache.mover import TierMover
from tierax.cache.moves import Move, Outcome
from tierax.cache.page_keys import PageKey

PAGE = 192
LAYOUT = PageLayout((PAGE,), "uint8")
OK = Outcome.OK


def key(number: int) -> PageKey:
    name = number.to_bytes(16, "big")
    return PageKey(b"n" * 16, name, b"p" * 16, number)


class Gathering:
    def __init__(self, device: ArrayDevice, pages: Sequence[int]) -> None:
        self._device = device
        self._rows = device.pages[list(pages)]
        self.error: Exception | None = None

    def is_ready(self) -> bool:
        return self._device.steps_done.is_set()

    def rows(self) -> np.ndarray:
        if self._device.fault is not None:
            raise self._device.fault
        return self._rows

    def release(self) -> None:
        self._device.blocks += 1

    abandon = release


class ArrayDevice:
    """A device pool in NumPy. While `steps_done` is not set, no gather is ready."""

    page_bytes = PAGE
    batch_pages = 2
    bytes_held = 0

    def __init__(self, num_pages: int = 16, buffers: int = 8) -> None:
        self.pages = np.zeros((num_pages, PAGE), np.uint8)
        self.steps_done = threading.Event()
        self.steps_done.set()
        self.blocks = buffers
        self.stagings = buffers
        self.fewest_stagings = buffers
        self.fault: Exception | None = None
        self.scattered: list[list[int]] = []

    def gather(self, pages: Sequence[int]) -> Gathering | None:
        if self.fault is not None:
            raise self.fault
        assert len(pages) <= self.batch_pages
        if self.blocks == 0:
            return None
        self.blocks -= 1
        return Gathering(self, pages)

    def take_staging(self) -> Any:
        if self.stagings == 0:
            return None
        self.stagings -= 1
        self.fewest_stagings = min(self.fewest_stagings, self.stagings)
        return Staging(self.batch_pages)

    def upload(self, staging: Any, count: int) -> None: ...

    def scatter(self, staging: Any, pages: Sequence[int]) -> None:
        self.stagings += 1
        if self.fault is not None:
            raise self.fault
        self.scattered.append(list(pages))
        self.pages[list(pages)] = staging.rows[: len(pages)]

    def give_back(self, staging: Any) -> None:
        self.stagings += 1


class Staging:
    def __init__(self, pages: int) -> None:
        self.rows = np.zeros((pages, PAGE), np.uint8)


class GatedHost(HostPool):
    """Rows that are copied from only while `open` is set."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, PAGE)
        self.open = threading.Event()
        self.open.set()

    def get(self, rows: Sequence[int], pages: np.ndarray) -> None:
        assert self.open.wait(10)
        super().get(rows, pages)


class Bench:
    """A mover with all its neighbours, and the verbs of a test."""

    def __init__(self, rows: int = 8, buffers: int = 8, **settings: Any) -> None:
        self.device = ArrayDevice(buffers=buffers)
        self.host = GatedHost(rows)
        self.store = DictStore()
        self.wakes = 0
        self.mover = TierMover(
            self.device,
            self.host,
            clock=time.monotonic,
            records=PageRecords(self.store, Share.whole(LAYOUT)),
            wake=self._wake,
            **settings,
        )

    def _wake(self) -> None:
        self.wakes += 1

    def put(self, page: int, value: int) -> None:
        """As a step does that writes a page."""
        self.device.pages[page] = value

    def value(self, page: int) -> int:
        values = set(self.device.pages[page].tolist())
        assert len(values) == 1, "a page of two halves"
        return values.pop()

    def wait(self, *moves: Move) -> None:
        self.until(lambda: all(move.done for move in moves))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            self.mover.poll(0.0)
            assert time.monotonic() < end, "nothing happens"
            time.sleep(0.0005)

    def fill(self, values: Sequence[int]) -> None:
        """Rows 0, 1, … get the values, by way of device page 15."""
        for row, value in enumerate(values):
            self.put(15, value)
            self.wait(self.mover.save([15], [row]))

    def stored(self, values: Sequence[int]) -> None:
        """The store gets pages `key(0)`, `key(1)`, … with the values."""
        self.fill(values)
        move = self.mover.write([key(i) for i in range(len(values))], range(len(values)))
        self.wait(move)
        assert move.good == len(values)
