"""Movements between the tiers that take simulated time: every direction is one queue of its own bandwidth and latency."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..cache.moves import Move, Outcome
from ..cache.page_keys import PageKey
from .clock import SimClock


@dataclass(slots=True)
class Path:
    """One direction between two tiers. Transfers queue; the latency of one hides behind another's bytes."""

    bytes_s: float
    latency_s: float = 0.0
    free_at: float = 0.0
    moved_bytes: int = 0
    busy_seconds: float = 0.0

    def send(self, num_bytes: int, now: float) -> float:
        """When a transfer that is asked for now is over."""
        seconds = num_bytes / self.bytes_s
        self.free_at = max(self.free_at, now) + seconds
        self.moved_bytes += num_bytes
        self.busy_seconds += seconds
        return self.free_at + self.latency_s


class SimMover:
    """Implements `moves.Mover`. Nothing ever fails. A page is told of when it is there, however many were asked for."""

    def __init__(self, clock: SimClock, paths: dict[str, Path], page_bytes: int, record_bytes: int) -> None:
        """`paths` by kind of movement: save, load, read and write."""
        self.paths = paths
        self.ios = 0
        """Pages read from the disk, or written to it."""
        self._clock = clock
        self._page_bytes = page_bytes
        self._bytes = {"save": page_bytes, "load": page_bytes, "read": record_bytes, "write": record_bytes}
        self._due: dict[str, deque[tuple[float, Move, int]]] = {kind: deque() for kind in paths}
        """Pages under way: when they are there, and which of their movement they are."""
        self._cancelled: list[Move] = []

    def save(self, device_pages: Sequence[int], host_rows: Sequence[int]) -> Move:
        return self._send("save", len(device_pages))

    def load(self, host_rows: Sequence[int], device_pages: Sequence[int]) -> Move:
        return self._send("load", len(host_rows))

    def read(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        self.ios += len(keys)
        return self._send("read", len(keys))

    def write(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        self.ios += len(keys)
        return self._send("write", len(keys))

    def delete(self, keys: Sequence[PageKey]) -> None:
        self.ios += len(keys)

    def take_undeleted(self) -> list[PageKey]:
        return []

    def poll(self, now: float) -> list[Move]:
        news: dict[Move, None] = dict.fromkeys(self._cancelled)
        self._cancelled = []
        for kind, due in self._due.items():
            seconds = self._bytes[kind] / self.paths[kind].bytes_s
            while due and due[0][0] <= now:
                _, move, at = due.popleft()
                if move.outcomes[at] is None:
                    move.outcomes[at] = Outcome.OK
                    move.seconds += seconds
                    news[move] = None
        return list(news)

    def next_event(self) -> float | None:
        """When the next page arrives somewhere."""
        times = [due[0][0] for due in self._due.values() if due]
        return min(times) if times else None

    def cancel(self, move: Move) -> None:
        if move.kind == "load" and not move.done:
            move.outcomes[:] = [outcome or Outcome.CANCELLED for outcome in move.outcomes]
            self._cancelled.append(move)

    def reset(self) -> set[int]:
        return set()

    def in_flight(self) -> Counter[str]:
        """Pages that have not arrived, by kind."""
        return Counter({kind: len(due) for kind, due in self._due.items()})

    def _send(self, kind: str, pages: int) -> Move:
        move = Move(kind, pages, self._page_bytes)
        path, size, now = self.paths[kind], self._bytes[kind], self._clock.now
        due = self._due[kind]
        for at in range(pages):
            due.append((path.send(size, now), move, at))
        move.seconds = path.latency_s
        return move
