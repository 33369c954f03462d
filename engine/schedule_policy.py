"""In which order waiting requests are considered. A policy only orders; the scheduler admits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .request import Request

MatchLength = Callable[[Request], int]


class SchedulePolicy(Protocol):
    """Orders the waiting requests for admission."""

    def order(self, waiting: Sequence[Request], match_length: MatchLength, now: float) -> Sequence[Request]:
        """The requests, the first to admit first. `waiting` is in order of arrival, retracted ones in front."""
        ...


class FCFS:
    """First come, first served."""

    def order(self, waiting: Sequence[Request], match_length: MatchLength, now: float) -> Sequence[Request]:
        return waiting


class LPM:
    """Longest prefix match first, so that what is cached is used before it is evicted.

    A request that has waited `max_age` seconds goes before all younger ones, so that none starves. Only the oldest
    `window` requests are compared, which bounds the work of a step.
    """

    def __init__(self, max_age: float = 5.0, window: int = 128) -> None:
        self.max_age = max_age
        self.window = window

    def order(self, waiting: Sequence[Request], match_length: MatchLength, now: float) -> Sequence[Request]:
        head, rest = list(waiting[: self.window]), waiting[self.window :]
        aged = [r for r in head if now - r.arrival >= self.max_age]
        young = [r for r in head if now - r.arrival < self.max_age]
        young.sort(key=match_length, reverse=True)
        return [*aged, *young, *rest]


SCHEDULE_POLICIES: dict[str, Callable[[], SchedulePolicy]] = {"fcfs": FCFS, "lpm": LPM}
