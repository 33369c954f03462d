"""Copies of a model for who wants to turn one loop in a thread of his own, as `LLM` does."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

from .replicas import Replicas
from .request import Delta, Request

PATIENCE = 0.05
"""Seconds that a turn waits for news."""


class Loop(Protocol):
    """What a caller needs of `loop.EngineLoop`."""

    @property
    def idle(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> bool: ...


class ReplicaLoop:
    """Requests go to the copies, whose threads run them; `step` brings what has come of them to the caller."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._news: queue.SimpleQueue[tuple[Delta, Callable[[Delta], None] | None]] = queue.SimpleQueue()
        self._open: set[str] = set()

    @property
    def idle(self) -> bool:
        """Nothing to run, and nothing to move between the tiers."""
        return not self._open and all(thread.engine.loop.idle for thread in self._replicas.replicas)

    def add(self, request: Request) -> None:
        told = request.on_delta
        request.on_delta = lambda delta: self._news.put((delta, told))
        self._open.add(request.id)
        self._replicas.submit([request])

    def abort(self, request_id: str) -> None:
        """Ends a request, after a turn or some; unknown and ended ids are ignored."""
        self._replicas.abort([request_id])

    def step(self) -> bool:
        """Hands out the news that there is, waited for a moment while requests are under way. False when there is none, or
        nothing is left to come. Raises RuntimeError when a copy has ended."""
        if not self._open:
            return False
        try:
            news = self._news.get(timeout=PATIENCE)
            while True:
                self._tell(*news)
                news = self._news.get_nowait()
        except queue.Empty:
            pass
        if self._open and not self._replicas.alive:
            raise RuntimeError("a copy of the model has ended; the log says why")
        return bool(self._open)

    def _tell(self, delta: Delta, told: Callable[[Delta], None] | None) -> None:
        if delta.finish_reason is not None:
            self._open.discard(delta.request.id)
        if told is not None:
            told(delta)
