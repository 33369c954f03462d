"""Spreads the lines of a batch over workers that may die, so that common beginnings meet on one worker.

Each worker has a run of neighbouring lines and goes through it in pieces; who is through helps where most is left. What a
dead worker had in hand goes to others, and the worker is replaced. An answer counts once it has come back, so each line is
written exactly once. Knows nothing of Ray.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..serving.batch.lines import Line, Problem, problem_line
from .prefix_order import cut, prefix_key

PIECE = 16
"""Lines that travel together."""
LONE_DEATHS = 2
"""Workers that a piece may outlive as a whole; then its lines go one by one, to find out which it is."""
MOST_DEATHS = 3
"""Workers that a lone line may outlive; then it is the line that fails."""
DEATHS_IN_A_ROW = 5
"""Deaths per worker without one answer in between after which something else must be wrong."""


class WorkerDied(Exception):
    """A worker is gone, and with it what it had in hand; the message says why."""


class Workers(Protocol):
    """Workers `0 … count - 1`, each of which answers several pieces at once."""

    count: int

    def submit(self, worker: int, lines: list[Line]) -> Hashable:
        """Hands over a piece; the result names it in `wait`."""
        ...

    def wait(self, pieces: Sequence[Hashable]) -> list[tuple[Hashable, list[bytes] | WorkerDied]]:
        """Blocks until one of them at least has its output lines, or never will."""
        ...

    def replace(self, worker: int) -> None:
        """A new worker in the place of a dead one; the others go on meanwhile."""
        ...


@dataclass(slots=True, eq=False)
class _Piece:
    lines: list[Line]
    deaths: int = 0


def spread(
    lines: Iterable[Line], workers: Workers, put: Callable[[bytes], None], *, concurrency: int
) -> None:
    """Answers all lines; `put` gets every output line once, in the order of arrival.

    `concurrency`: lines that a worker has in hand at once. Raises `WorkerDied` when workers die and die again without
    an answer in between.
    """
    _Spread(workers, put, max(concurrency // PIECE, 1)).run(lines)


class _Spread:
    def __init__(self, workers: Workers, put: Callable[[bytes], None], most_in_hand: int) -> None:
        self._workers = workers
        self._put = put
        self._most_in_hand = most_in_hand
        self._runs: list[deque[_Piece]] = [deque() for _ in range(workers.count)]
        self._returned: deque[_Piece] = deque()
        """What dead workers had in hand."""
        self._in_hand: dict[Hashable, tuple[int, _Piece]] = {}
        self._deaths_in_a_row = 0

    def run(self, lines: Iterable[Line]) -> None:
        self._deal(lines)
        while True:
            self._hand_out()
            if not self._in_hand:
                return
            for name, result in self._workers.wait(list(self._in_hand)):
                if name not in self._in_hand:
                    # Its worker was found dead a moment ago.
                    continue
                if isinstance(result, WorkerDied):
                    self._bury(self._in_hand[name][0], result)
                else:
                    del self._in_hand[name]
                    self._deaths_in_a_row = 0
                    for raw in result:
                        self._put(raw)

    def _deal(self, lines: Iterable[Line]) -> None:
        good: list[Line] = []
        for line in lines:
            if line.problem is not None:
                self._put(problem_line(line, line.problem))
            else:
                good.append(line)
        pairs = sorted(((prefix_key(line.body), line.number, line) for line in good), key=lambda p: p[:2])
        runs = cut([line for _, _, line in pairs], [key for key, _, _ in pairs], self._workers.count)
        for run, own in zip(runs, self._runs, strict=False):
            own.extend(_Piece(list(run[at : at + PIECE])) for at in range(0, len(run), PIECE))

    def _hand_out(self) -> None:
        """Round by round, so that the last pieces do not all go to the first worker."""
        busy = Counter(worker for worker, _ in self._in_hand.values())
        for _ in range(self._most_in_hand):
            for worker in range(self._workers.count):
                if busy[worker] < self._most_in_hand and (piece := self._next_for(worker)) is not None:
                    busy[worker] += 1
                    self._in_hand[self._workers.submit(worker, piece.lines)] = (worker, piece)

    def _next_for(self, worker: int) -> _Piece | None:
        if self._returned:
            return self._returned.popleft()
        if self._runs[worker]:
            return self._runs[worker].popleft()
        longest = max(self._runs, key=len)
        # From the far end: its owner goes on with what it has begun.
        return longest.pop() if longest else None

    def _bury(self, worker: int, why: WorkerDied) -> None:
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= DEATHS_IN_A_ROW * self._workers.count:
            raise why
        for name, (owner, piece) in list(self._in_hand.items()):
            if owner == worker:
                del self._in_hand[name]
                self._return(piece, why)
        self._workers.replace(worker)

    def _return(self, piece: _Piece, why: WorkerDied) -> None:
        piece.deaths += 1
        if len(piece.lines) > 1 and piece.deaths >= LONE_DEATHS:
            self._returned.extend(_Piece([line]) for line in piece.lines)
        elif piece.deaths >= MOST_DEATHS:
            (line,) = piece.lines
            self._put(problem_line(line, Problem("worker_died", f"Workers died of this line: {why}")))
        else:
            self._returned.append(piece)
