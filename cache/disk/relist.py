"""Finds what others have written to the store since it was opened."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .local import StoreError

_log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_SHARE = 0.02
"""Part of the time that listing may take: a large store is listed less often."""


class Relist(Generic[T]):
    """Calls `listing` every `interval` seconds, or less often, in a thread of its own, which `close` ends. That may raise
    StoreError."""

    def __init__(
        self,
        listing: Callable[[], T],
        interval: float,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._listing = listing
        self._interval = interval
        self._clock = clock
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._found: T | None = None
        self._thread = threading.Thread(target=self._run, name="tierax-relist", daemon=True)
        self._thread.start()

    def take(self) -> T | None:
        """What it has returned last, once; None if there is nothing new."""
        if self._found is None:
            return None
        with self._lock:
            found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Ends the thread; a listing under way is waited for, as it has a bound of its own."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pause = self._interval
        while not self._ended.wait(pause):
            began = self._clock()
            try:
                found = self._listing()
            except StoreError as error:
                _log.warning("%s", error)
                found = None
            pause = max(self._interval, (self._clock() - began) / MOST_SHARE)
            with self._lock:
                self._found = found
