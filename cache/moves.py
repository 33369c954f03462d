"""Movements of pages between the tiers: what is asked of a mover, and how it answers.

    L1 device  --save-->  L2 host  --write-->  L3 disk
               <--load--           <--read---

A mover is an array-bound or a simulated thing; who decides what moves is neither. Its order is its promise:

- `save` reads its device pages as they are after all steps submitted so far, so they may be given away at once;
- a host row is read and written strictly in the order of the calls, so a row may be given away, and a saved row
  loaded or written, right after the call. Only a `read` writes into rows at a time of its own: its rows belong to it
  until their outcomes are seen;
- a `load` has reached its device pages for every step submitted after `poll` has told of it. Its device pages belong
  to it until then, or until `cancel`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .page_keys import PageKey


class Outcome(enum.Enum):
    """What has become of one page of a movement."""

    OK = "ok"
    MISSING = "missing"
    """The store has no such record (any more)."""
    CORRUPT = "corrupt"
    """A record of the wrong length, header or checksum."""
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"
    DENIED = "denied"
    """Permission denied, or the store is read-only."""
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Move:
    """One movement of one or more pages; the mover fills in `outcomes`, and only inside `poll`."""

    kind: str
    """`save`, `load`, `read` or `write`."""
    pages: int
    page_bytes: int
    outcomes: list[Outcome | None] = field(default_factory=list)
    """By page; None while it is under way."""
    seconds: float = 0.0
    """Time of the copying itself, waiting in queues left out, once all is done."""

    def __post_init__(self) -> None:
        self.outcomes = [None] * self.pages

    @property
    def done(self) -> bool:
        return None not in self.outcomes

    @property
    def good(self) -> int:
        """Leading pages that have arrived."""
        return next((i for i, o in enumerate(self.outcomes) if o is not Outcome.OK), self.pages)


class Mover(Protocol):
    """Everything is called from one thread, returns at once, and never raises for a fault of disk or network."""

    def save(self, device_pages: Sequence[int], host_rows: Sequence[int]) -> Move:
        """L1 -> L2."""
        ...

    def load(self, host_rows: Sequence[int], device_pages: Sequence[int]) -> Move:
        """L2 -> L1."""
        ...

    def read(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        """L3 -> L2: all at once; every page has its own outcome, in any order, after its checksum was verified."""
        ...

    def write(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        """L2 -> L3: every page has its own outcome. A page becomes visible in the store only when it is whole."""
        ...

    def delete(self, keys: Sequence[PageKey]) -> None:
        """Removes pages from L3, in order with `write`; what is absent already is no error."""
        ...

    def take_undeleted(self) -> list[PageKey]:
        """Pages that a `delete` has failed to remove since the last call."""
        ...

    def poll(self, now: float) -> list[Move]:
        """Observes what has happened, puts staged loads onto the device, and returns the moves that have news."""
        ...

    def cancel(self, move: Move) -> None:
        """A load that nobody wants: it reaches no device page from now on. It is told of by `poll` as cancelled."""
        ...

    def reset(self) -> set[int]:
        """After a fault of the device: loads and saves under way are dropped; returns the host rows that saves have
        not filled. Reads and writes go on."""
        ...
