"""A mover in plain Python over the fake device's cells: exact order, delays by a manual clock, faults on demand.

Rows that belong to a read hold nothing until its outcome, so that whoever uses them too early fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierax.cache.moves import Move, Outcome
from tierax.cache.page_keys import PageKey

from .fake_executor import Cell, FakeExecutor, ManualClock

Page = list[Cell | None]
Fault = Callable[[str, PageKey], Outcome]
"""(`read` or `write`, page) -> what becomes of it."""


class FakeStore:
    """What outlives a process: records by key."""

    def __init__(self) -> None:
        self.pages: dict[PageKey, Page] = {}


@dataclass(slots=True)
class _Job:
    move: Move
    at: int
    began: float
    due: float
    finish: Callable[[], Outcome]


@dataclass(slots=True)
class _Load:
    move: Move
    due: float
    contents: list[Page]
    pages: list[int]


class FakeMover:
    """Implements `moves.Mover`."""

    def __init__(
        self, device: FakeExecutor, store: FakeStore, clock: ManualClock, *, page_bytes: int = 1000
    ) -> None:
        self.store = store
        self.delay: Callable[[str], float] = lambda kind: 0.0
        """Seconds that a page takes, by kind of movement."""
        self.fault: Fault = lambda kind, key: Outcome.OK
        self.rows: dict[int, Page] = {}
        self.moves: list[Move] = []
        self._device = device
        self._clock = clock
        self._page_bytes = page_bytes
        self._jobs: list[_Job] = []
        self._loads: list[_Load] = []
        self._saves: list[Move] = []
        self._deleted: set[PageKey] = set()

    def in_flight(self) -> Counter[str]:
        """As the real one's."""
        found: Counter[str] = Counter()
        for move in self.moves:
            found[move.kind] += move.outcomes.count(None)
        return found

    def save(self, device_pages: Sequence[int], host_rows: Sequence[int]) -> Move:
        move = self._move("save", len(host_rows), len(device_pages))
        for page, row in zip(device_pages, host_rows, strict=True):
            self.rows[row] = self._device.read_page(page)
        self._saves.append(move)
        return move

    def load(self, host_rows: Sequence[int], device_pages: Sequence[int]) -> Move:
        move = self._move("load", len(host_rows), len(device_pages))
        contents = [list(self.rows[row]) for row in host_rows]
        self._loads.append(_Load(move, self._clock.now + self.delay("load"), contents, list(device_pages)))
        return move

    def read(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        move = self._move("read", len(host_rows), len(keys))
        for at, (key, row) in enumerate(zip(keys, host_rows, strict=True)):
            self.rows.pop(row, None)

            def finish(key: PageKey = key, row: int = row) -> Outcome:
                outcome = self.fault("read", key)
                if outcome is Outcome.OK and key not in self.store.pages:
                    outcome = Outcome.MISSING
                if outcome is Outcome.OK:
                    assert row not in self.rows, "somebody used the row of a read"
                    self.rows[row] = list(self.store.pages[key])
                return outcome

            self._jobs.append(_Job(move, at, self._clock.now, self._clock.now + self.delay("read"), finish))
        return move

    def write(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        move = self._move("write", len(host_rows), len(keys))
        for at, (key, row) in enumerate(zip(keys, host_rows, strict=True)):
            contents = list(self.rows[row])
            self._deleted.discard(key)

            def finish(key: PageKey = key, contents: Page = contents) -> Outcome:
                outcome = self.fault("write", key)
                if outcome is Outcome.OK and key not in self._deleted:
                    self.store.pages[key] = contents
                return outcome

            self._jobs.append(_Job(move, at, self._clock.now, self._clock.now + self.delay("write"), finish))
        return move

    def delete(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self._deleted.add(key)
            self.store.pages.pop(key, None)

    def take_undeleted(self) -> list[PageKey]:
        return []

    def poll(self, now: float) -> list[Move]:
        news: dict[Move, None] = {}
        for job in [job for job in self._jobs if job.due <= now]:
            self._jobs.remove(job)
            job.move.outcomes[job.at] = job.finish()
            news[job.move] = None
            job.move.seconds = max(job.move.seconds, job.due - job.began)
        for load in [load for load in self._loads if load.due <= now]:
            self._loads.remove(load)
            for page, contents in zip(load.pages, load.contents, strict=True):
                self._device.write_page(page, contents)
            load.move.outcomes[:] = [Outcome.OK] * load.move.pages
            news[load.move] = None
        for move in self._saves:
            move.outcomes[:] = [Outcome.OK] * move.pages
            news[move] = None
        self._saves.clear()
        for move in news:
            move.seconds = max(move.seconds, 0.001 * move.pages)
        return list(news)

    def cancel(self, move: Move) -> None:
        self._loads = [load for load in self._loads if load.move is not move]

    def reset(self) -> set[int]:
        self._loads.clear()
        self._saves.clear()
        return set()

    def _move(self, kind: str, pages: int, sources: int) -> Move:
        assert pages == sources > 0
        move = Move(kind, pages, self._page_bytes)
        self.moves.append(move)
        return move
