"""A page store in a dict, whose answers a test can hold back, spoil or refuse."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tierax.cache.disk.names import PartKey, RecordKey
from tierax.cache.disk.readers import copy_into
from tierax.cache.moves import Outcome


class DictStore:
    """Has the three movements of `PageStore`, for whole pages. Answers at once, or from `answer` while it is `held`."""

    def __init__(self) -> None:
        self.records: dict[RecordKey, bytes] = {}
        self.held = False
        self.faults: dict[RecordKey, Outcome] = {}
        self.raises: set[RecordKey] = set()
        self.spoil: dict[RecordKey, Callable[[bytes], bytes]] = {}
        """What a read makes of a record."""
        self.calls: list[tuple[str, RecordKey]] = []
        self._answers: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def read_into(
        self, key: RecordKey, buffers: Sequence[memoryview], done: Callable[[Outcome], None]
    ) -> None:
        def answer() -> None:
            if key in self.faults:
                done(self.faults[key])
            elif key not in self.records:
                done(Outcome.MISSING)
            else:
                done(copy_into(self.spoil.get(key, bytes)(self.records[key]), buffers))

        self._call("read", key, answer)

    def fetch(self, key: RecordKey, done: Callable[[Outcome, bytes], None]) -> None:
        raise AssertionError("no page is in parts here")

    def note_parts(self, parts: Iterable[PartKey]) -> None:
        raise AssertionError("no page is in parts here")

    def write(self, key: RecordKey, record: bytes, done: Callable[[Outcome], None]) -> None:
        def answer() -> None:
            if key not in self.faults:
                self.records[key] = record
            done(self.faults.get(key, Outcome.OK))

        self._call("write", key, answer)

    def delete(self, key: RecordKey, done: Callable[[Outcome], None]) -> None:
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

    def _call(self, verb: str, key: RecordKey, answer: Callable[[], None]) -> None:
        if key in self.raises:
            raise OSError("this store is out of order")
        with self._lock:
            self.calls.append((verb, key))
            if self.held:
                self._answers.append(answer)
                return
        answer()
