"""The real loop on a tiny real model over three tiers, of which the disk does what a test wants."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helpers.faulty_store import FaultyStore
from helpers.tiny_engine import Run, TinyDevice
from helpers.tiny_tiers import TinyTiers
from tierax.cache.page_keys import PageKey
from tierax.engine.request import Request

PATIENCE_S = 120.0
"""Real seconds after which what should have happened has not."""


class FaultyRun(Run):
    """`check()` of everything holds after every step. A restart is another run on the same directory.

    The clock moves with every step that computes. While there is only waiting to be done it moves by `idle_tick`: 0 stands
    for a disk that is quick in the clock's terms, more for one that takes its time.
    """

    tiers: TinyTiers

    def __init__(
        self,
        device: TinyDevice,
        directory: Path,
        *,
        pages: int | None = None,
        host_pages: int = 64,
        seed: int = 0,
        idle_tick: float = 0.0,
        **options: Any,
    ) -> None:
        """`seed` of the store's chances; `options` are those of `Run`."""
        # A test that failed may have left steps in flight, and pages that could pass for ours.
        device.executor.reset()
        super().__init__(
            device,
            pages or device.pages,
            host_pages=host_pages,
            directory=directory,
            wrap_store=lambda store: FaultyStore(store.url, seed=seed),
            **options,
        )
        self.device = device
        self.idle_tick = idle_tick
        assert isinstance(self.tiers.store, FaultyStore)
        self.store = self.tiers.store

    def step(self) -> None:
        if self.loop.step():
            self.clock.advance(0.01)
        else:
            # The threads that copy need time of the world's own.
            time.sleep(0.0005)
            self.clock.advance(self.idle_tick)
        self.loop.scheduler.check()
        assert self.tiers.index is not None
        self.tiers.index.check()

    def until(self, condition: Callable[[], bool], what: str = "it") -> None:
        """Steps until the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen; still here: {self.loop.request_ids}"
            self.step()

    def answer(self, prompt: Sequence[int], *args: Any, **options: Any) -> Request:
        """Adds a request and steps until it has ended; transfers may go on after that."""
        request = self.add(prompt, *args, **options)
        self.until(lambda: request.finish_reason is not None, f"the end of {request.id}")
        return request

    def finish(self, most_steps: int = 0) -> None:
        """Steps until nothing is left to do, and checks that nothing is held then, nor anything promised."""
        self.until(lambda: self.loop.idle, "rest")
        self.cache.check()
        assert self.cache.in_use == self.cache.host.in_use == 0
        assert not self.cache.rows_in_hand

    def forget(self) -> None:
        """Leaves the disk alone with its pages, and lets the time pass in which a slow disk or a failed write is
        remembered."""
        self.finish()
        self.cache.clear()
        assert self.cache.free == self.cache.num_pages, "the device is empty"
        assert self.cache.host.free == self.cache.host.num_pages, "the host is empty"
        self.clock.advance(20.0)

    def keys(self, tokens: Sequence[int], namespace: bytes = b"") -> list[PageKey]:
        """Of all whole pages of `tokens`."""
        return self.cache.page_names(namespace, array("i", tokens), len(tokens) // self.cache.page_size)

    def on_disk(self) -> set[PageKey]:
        """What the store itself lists."""
        return {page.key for page in self.store.list()}

    def waited(self, request: Request) -> float:
        """Seconds from arrival until the request was first scheduled."""
        assert request.first_scheduled is not None
        return request.first_scheduled - request.arrival
