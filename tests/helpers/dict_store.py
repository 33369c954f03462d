"""A page store in a dict, whose answers a test can hold back, spoil or refuse."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from tierax.cache.disk.readers import copy_into
from tierax.cache.moves import Outcome
from tierax.cache.page_keys import PageKey


class DictStore:
    """Has the three movements of `PageStore`. Answers at once, or from `answer` while it is `held`."""

    def __init__(self) -> None:
        self.records: dict[PageKey, bytes] = {}
        self.held = False
        self.faults: dict[PageKey, Outcome] = {}
        self.raises: set[PageKey] = set()
        self.spoil: dict[PageKey, Callable[[bytes], bytes]] = {}
        """What a read makes of a record."""
        self.calls: list[tuple[str, PageKey]] = []
        self._answers: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def read_into(self, key: PageKey, buffers: Sequence[memoryview], done: Callable[[Outcome], None]) -> None:
        def answer() -> None:
            if key in self.faults:
                done(self.faults[key])
            elif key not in self.records:
                done(Outcome.MISSING)
            else:
                done(copy_into(self.spoil.get(key, bytes)(self.records[key]), buffers))

        self._call("read", key, answer)

    def write(self, key: PageKey, record: bytes, done: Callable[[Outcome], None]) -> None:
        def answer() -> None:
            if key not in self.faults:
                self.records[key] = record
            done(self.faults.get(key, Outcome.OK))

        self._call("write", key, answer)

    def delete(self, key: PageKey, done: Callable[[Outcome], None]) -> None:
        def answer() -> None:
            self.records.pop(key, None)
            done(Outcome.OK)

        self._call("delete", key, answer)

    def answer(self, count: int | None = None) -> None:
        """Gives the first `count` answers that were held back, or all."""
        while count is None or count > 0:
            with self._lock:
                if not self._answers:
                    return
                answer = self._answers.popleft()
            answer()
            count = None if count is None else count - 1

    @property
    def waiting(self) -> int:
        """Answers held back."""
        with self._lock:
            return len(self._answers)

    def _call(self, verb: str, key: PageKey, answer: Callable[[], None]) -> None:
        if key in self.raises:
            raise OSError("this store is out of order")
        with self._lock:
            self.calls.append((verb, key))
            if self.held:
                self._answers.append(answer)
                return
        answer()
