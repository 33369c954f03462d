"""Several answers that count as one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..moves import Outcome

_WORST_FIRST = (Outcome.CORRUPT, Outcome.MISSING)
"""What a page is given up for, before what may be otherwise the next time."""


class Together:
    """To be called with each of `count` outcomes, in any threads; the last call passes the worst of them on to `done`, or to
    who asks for it with `then`."""

    def __init__(self, count: int, done: Callable[[Outcome], None] | None = None) -> None:
        self._missing = count
        self._done = done
        self._bad: set[Outcome] = set()
        self._lock = threading.Lock()

    def __call__(self, outcome: Outcome) -> None:
        with self._lock:
            self._missing -= 1
            if outcome is not Outcome.OK:
                self._bad.add(outcome)
            done = None if self._missing else self._done
        if done is not None:
            done(self._worst())

    def then(self, done: Callable[[Outcome], None]) -> None:
        """Once, for one that was made without `done`."""
        with self._lock:
            self._done = done
            missing = self._missing
        if not missing:
            done(self._worst())

    def _worst(self) -> Outcome:
        for outcome in (*_WORST_FIRST, *Outcome):
            if outcome in self._bad:
                return outcome
        return Outcome.OK
