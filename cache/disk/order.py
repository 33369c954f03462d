"""The order in which writes and deletes of one store start."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class _Operation(NamedTuple):
    name: str
    deletes: bool
    start: Callable[[], None]


class WriteOrder:
    """Starts operations as they come, many at once, but for two rules:

    - those on one name run one after the other, so the last call decides what is there;
    - a write waits for the deletes called before it, so what was deleted to make room is gone before the room is used.

    Safe to call from any thread. `start` runs in whichever thread makes it possible, and may call `finish` at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Operation] = deque()
        self._running: set[str] = set()
        self._deletes = 0
        """Deletes among the running."""
        self._starting = False

    def submit(self, name: str, start: Callable[[], None], *, deletes: bool = False) -> None:
        """`start` begins the operation, now or later; whoever completes it calls `finish` with the same arguments."""
        with self._lock:
            self._waiting.append(_Operation(name, deletes, start))
        self._advance()

    def finish(self, name: str, *, deletes: bool = False) -> None:
        with self._lock:
            self._running.remove(name)
            self._deletes -= deletes
        self._advance()

    def _advance(self) -> None:
        # One starter at a time: an operation that completes within its own start must not start the next one deeper
        # in the same stack. Whoever finds a starter at work leaves the rest to it.
        while True:
            with self._lock:
                if self._starting or not self._waiting:
                    return
                operation = self._waiting[0]
                if operation.name in self._running or (self._deletes and not operation.deletes):
                    return
                self._waiting.popleft()
                self._running.add(operation.name)
                self._deletes += operation.deletes
                self._starting = True
            operation.start()
            with self._lock:
                self._starting = False
