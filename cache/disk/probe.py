"""Asks the store for pages that the index does not know: what another process has written a moment ago.

A prompt that nobody knows costs one question, for its first unknown page. If that is there, the end of what is stored is
found by asking for several pages in between at once, and then again between two of those: a store that has a page has
its heads, as a rule. (Where it has not, reading shows that.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ..moves import Outcome
from ..page_keys import PageKey
from ..rates import Rate

WIDTH = 16
"""Questions at once: 16 unknown pages take two rounds, 256 three, 4,096 four."""
MOST_PROBES = 32
"""Prompts that are asked for at once; more than these are taken for unknown."""
ABSENT_S = 1.0
"""How long a page that was not there is not asked for again: many requests may begin alike."""
PAUSE_S = 5.0
"""Seconds without questions after one has failed, or was not answered in time."""
MOST_ABSENT = 10_000


class Store(Protocol):
    """What this needs of a `PageStore`."""

    def probe(self, key: PageKey, done: Callable[[Outcome], None]) -> None: ...


class Probe:
    """One search, over the keys of pages that follow each other. `found` is how many of them are stored, None as long as
    that is not known."""

    def __init__(self, store: Store, keys: Sequence[PageKey], ended: Callable[[Probe, bool], None]) -> None:
        self.found: int | None = None
        self.keys = keys
        self._store = store
        self._ended = ended
        self._lock = threading.Lock()
        self._there, self._missing = 0, len(keys)
        """So many leading pages are there; this one is not, as far as is known."""
        self._open = 0
        self._failed = False

    def start(self) -> None:
        self._ask([0])

    def _ask(self, places: Sequence[int]) -> None:
        self._open = len(places)
        for place in places:
            self._store.probe(self.keys[place], partial(self._answer, place))

    def _answer(self, place: int, outcome: Outcome) -> None:
        with self._lock:
            if outcome is Outcome.OK:
                self._there = max(self._there, place + 1)
            else:
                self._missing = min(self._missing, place)
                self._failed |= outcome is not Outcome.MISSING
            self._open -= 1
            if self._open:
                return
        there = min(self._there, self._missing)
        if there == self._missing or self._failed:
            self.found = there
            self._ended(self, self._failed)
        else:
            self._there = there
            self._ask(_spread(there, self._missing))


class Prober:
    """Starts probes, within bounds. `ask` is for one thread; answers come from the store's."""

    def __init__(self, store: Store, *, record_bytes: int, clock: Callable[[], float]) -> None:
        """`record_bytes`: of a page in the store."""
        self.record_bytes = record_bytes
        self.asked = self.hits = 0
        """Probes, and those that found something; they only grow."""
        self.seconds = Rate()
        """What a probe takes, in probes per second of waiting."""
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[Probe, float] = {}
        """Since when."""
        self._absent: dict[bytes, float] = {}
        self._quiet_until = float("-inf")

    def ask(self, keys: Sequence[PageKey]) -> Probe | None:
        """Looks for these pages, which follow each other; None if that is not to be done now."""
        now = self._clock()
        with self._lock:
            since = self._absent.get(keys[0].key)
            if (
                now < self._quiet_until
                or len(self._running) >= MOST_PROBES
                or (since is not None and now - since < ABSENT_S)
            ):
                return None
            probe = Probe(self._store, keys, self._end)
            self._running[probe] = now
            self.asked += 1
        probe.start()
        return probe

    def give_up(self, probe: Probe) -> None:
        """It was not answered in time: others need not wait for the same store."""
        with self._lock:
            self._quiet_until = self._clock() + PAUSE_S

    def _end(self, probe: Probe, failed: bool) -> None:
        now = self._clock()
        with self._lock:
            began = self._running.pop(probe)
            if failed:
                self._quiet_until = now + PAUSE_S
            elif probe.found:
                self.hits += 1
            else:
                self._absent.pop(probe.keys[0].key, None)
                self._absent[probe.keys[0].key] = now
                if len(self._absent) > MOST_ABSENT:
                    del self._absent[next(iter(self._absent))]
            self.seconds.measure(1, now - began, now)


def _spread(first: int, end: int) -> list[int]:
    """At most `WIDTH` places in `[first, end)`, evenly, the last among them."""
    count = min(WIDTH, end - first)
    return [first + (end - first) * (i + 1) // count - 1 for i in range(count)]
