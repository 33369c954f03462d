"""A page of the disk tier as the index knows it, and what is counted of all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..page_keys import PageKey
from .names import Stored


class Page:
    """One page of the tier, and an `Evictable` for its policy."""

    __slots__ = ("children", "key", "locks", "nbytes", "parent", "rank", "stored")

    size = 1

    def __init__(self, key: PageKey, nbytes: int, parent: Page | None, *, stored: bool) -> None:
        self.key = key
        self.nbytes = nbytes
        self.parent = parent
        """None for the first page of a sequence."""
        self.stored = stored
        self.children: dict[Page, None] = {}
        self.rank: Any = None

    @property
    def end(self) -> int:
        return self.key.depth + 1

    @property
    def identity(self) -> bytes:
        return self.key.key

    @property
    def identities(self) -> tuple[bytes]:
        return (self.key.key,)

    @property
    def head(self) -> Page | None:
        return self.parent


@dataclass(slots=True)
class DiskStats:
    """Counters since the start; they only grow."""

    stored_pages: int = 0
    """Pages whose write was reported as done."""
    stored_bytes: int = 0
    refused_pages: int = 0
    """Reservations that found no room, or no head."""
    evicted_pages: Counter[str] = field(default_factory=Counter)
    """Pages that left the index, by reason: `capacity`, `space_floor`, `ttl`, `failed` (a write), `orphan` (listed, its
    head or its own record absent), `cleared`, and those that callers of `remove` give (`missing`, `corrupt`, `io_error`, …)."""
    evicted_bytes: int = 0


@dataclass(slots=True)
class NamespaceStats:
    pages: int = 0
    bytes: int = 0
    deepest: int = 0
    """Pages of the longest sequence."""


class Listing(NamedTuple):
    """What a list of the store's pages says that an index does not know."""

    unknown: list[Stored]
    absent: frozenset[PageKey]
    """In the index, but not in the list."""
