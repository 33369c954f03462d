"""Records straight into the memory where they are wanted, by threads that may wait for a disk.

tensorstore hands a value over as an object of its own, of which Python must make bytes before it can look at them: two
copies more than there need be. Files of a local directory are plain files, and are read in one.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ..moves import Outcome


class Readers:
    """A number of threads, started when there is something to do for the first time."""

    def __init__(self, threads: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._wanted = threads
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
        thread = threading.Thread(target=self._run, name="tierax-reads", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def read_file_into(path: str, buffers: Sequence[memoryview]) -> Outcome:
    """Reads a whole file into `buffers`, one after the other; CORRUPT, with as much of it as goes in, unless it is exactly as
    long. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Usually one call is enough; a byte more than is wanted shows a file that is too long.
        missing = [*buffers, memoryview(bytearray(1))]
        while count := os.readv(file, missing):
            while missing and count >= missing[0].nbytes:
                count -= missing.pop(0).nbytes
            if len(missing) <= 1:
                break
            missing[0] = missing[0][count:]
        return Outcome.OK if len(missing) == 1 else Outcome.CORRUPT
    finally:
        os.close(file)


def copy_into(record: bytes, buffers: Sequence[memoryview]) -> Outcome:
    """The same with a record that is in memory."""
    start = 0
    for buffer in buffers:
        count = min(buffer.nbytes, len(record) - start)
        # NumPy copies without the GIL.
        np.copyto(np.frombuffer(buffer[:count], np.uint8), np.frombuffer(record, np.uint8, count, start))
        start += count
    return Outcome.OK if len(record) == sum(buffer.nbytes for buffer in buffers) else Outcome.CORRUPT
