"""When the requests of a trace arrive: as recorded, after the turn before, or as fast as so many users go on."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from .traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Pace:
    """How a trace's times are understood."""

    rate: float = 1.0
    """Arrivals come so many times as fast as recorded; think times stay."""
    closed: bool = False
    """A later turn arrives its think time after the end of the turn before, where the trace knows that time."""
    users: int | None = None
    """So many sessions at a time, the next of which begins when one has ended, whatever the recorded times; turns as with
    `closed`, at once where no think time is known."""


class Arrivals:
    """Hands out the requests' numbers in order of arrival, and is told when one has ended."""

    def __init__(self, trace: Trace, pace: Pace) -> None:
        self._requests = trace.requests
        self._pace = pace
        self._due: list[tuple[float, int]] = []
        self._after: dict[int, int] = {}
        """Request -> the next turn of its session, which waits for it."""
        self._sessions: deque[int] = deque()
        """First turns that wait for a user."""
        previous: dict[str, int] = {}
        for number, request in enumerate(self._requests):
            before = previous.get(request.session) if request.session else None
            if request.session:
                previous[request.session] = number
            follows = before is not None and (pace.users is not None or request.think is not None)
            if before is not None and follows and (pace.closed or pace.users is not None):
                self._after[before] = number
            elif pace.users is not None:
                self._sessions.append(number)
            else:
                self._due.append((request.arrival / pace.rate, number))
        heapq.heapify(self._due)
        for _ in range(min(pace.users or 0, len(self._sessions))):
            heapq.heappush(self._due, (0.0, self._sessions.popleft()))

    def next_time(self) -> float | None:
        """When the next one arrives; None: never, as far as can be said before another has ended."""
        return self._due[0][0] if self._due else None

    def pop(self) -> tuple[float, int]:
        """The next arrival's time, and which request it is."""
        return heapq.heappop(self._due)

    def ended(self, number: int, now: float) -> None:
        """A request is over: who waits for it is due."""
        follower = self._after.pop(number, None)
        if follower is not None:
            heapq.heappush(self._due, (now + (self._requests[follower].think or 0.0), follower))
        elif self._sessions:
            heapq.heappush(self._due, (now, self._sessions.popleft()))
