"""Threads of a store, which may wait for a disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ..background import step_back


class Threads:
    """A number of threads, started when there is something to do for the first time."""

    def __init__(self, name: str, count: int, *, background: bool = False) -> None:
        """background: nobody waits for what they do (see `background.step_back`)."""
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._name = name
        self._wanted = count
        self._background = background
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Has one of the threads run `task`, which must not raise. After `close` it runs at once."""
        with self._lock:
            if not self._closed:
                self._tasks.put(task)
                # All at once: what comes first is the many pages of a prefix.
                while len(self._threads) < self._wanted:
                    self._threads.append(self._start())
                return
        task()

    def close(self, *, wait: bool) -> None:
        """Ends the threads once all tasks have run. What is called with `wait` has none that is stuck."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)
        if wait:
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        if self._background:
            step_back()
        while (task := self._tasks.get()) is not None:
            task()
            # What it holds on to, a record, is not kept until the next one.
            del task
