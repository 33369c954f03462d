"""In which order waiting requests are considered. A policy only orders; the scheduler admits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from .request import Request, Status

MatchLength = Callable[[Request], int]

MAX_WAIT = 30.0
"""Seconds of waiting, all in all, after which a request goes before all others, whatever their priorities."""


class Urgency:
    """Of requests at one moment. Lower is sooner: a request's priority, until it has waited `max_wait` seconds, all in all,
    and is ahead of everybody.

    A request may displace running ones that are less urgent. Urgency changes only while a request waits, and only for
    the better: so no two requests displace each other in turn, and none waits for ever.
    """

    def __init__(self, max_wait: float = MAX_WAIT) -> None:
        self._max_wait = max_wait
        self._now = 0.0
        self._equals = True
        """All requests have the same priority, so that none counts, nor how long they wait."""

    def weigh(self, requests: Iterable[Request], now: float) -> bool:
        """From now on it is `now`, and there are these requests; says whether any goes before another."""
        self._now = now
        self._equals = len({request.priority for request in requests}) <= 1
        return not self._equals

    def of(self, request: Request) -> float:
        """Of one of them."""
        if self._equals:
            return 0
        waiting = self._now - request.waiting_since if request.status is Status.WAITING else 0.0
        return -math.inf if request.waited + waiting >= self._max_wait else request.priority

    def levels(self, requests: Collection[Request]) -> dict[float, list[Request]]:
        """Those of each urgency, in the order given."""
        if self._equals:
            return {0: list(requests)} if requests else {}
        levels: dict[float, list[Request]] = {}
        for request in requests:
            levels.setdefault(self.of(request), []).append(request)
        return levels

    def below(self, request: Request, others: Iterable[Request]) -> list[Request]:
        """The `others` that are less urgent than `request`, in the order given."""
        if self._equals:
            return []
        least = self.of(request)
        return [other for other in others if self.of(other) > least]


class SchedulePolicy(Protocol):
    """Orders the waiting requests of one urgency for admission."""

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
