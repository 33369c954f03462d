"""Which copy of a model a request goes to: where the least is left to do, what is cached and what is waiting weighed up.

Pure: what a copy's tiers hold is told by the cache itself (`PageView`), and who is under way by the caller.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..cache.page_keys import PageKey

if TYPE_CHECKING:
    from ..cache.radix_tree import Node

LOAD_WEIGHT = 0.25
"""What a token of a request under way counts, in tokens of the prompt that are to be computed: it shares its steps with
others, and a part of it is done."""
HELD_WEIGHT = 0.02
"""What a token that is cached counts, beyond what the emptiest copy has: where there are many, a new one drives out another.
So prompts that have only a system prompt in common do not fill one copy while the others stand empty."""
MOST_FOR_ROOM = 512.0
"""Tokens that are computed again for the sake of room, at most: a conversation stays where it is."""
ANSWER_TOKENS = 128
"""What an answer adds to its prompt, since nobody knows."""


class PageView:
    """Names of the pages that a copy's device or host holds. The copy's thread tells (`cache.page_events.PageListener`);
    any thread may ask."""

    def __init__(self) -> None:
        self._tiers: dict[bytes, int] = {}
        """Page -> a bit for each tier that has it."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._tiers

    def __len__(self) -> int:
        return len(self._tiers)

    def entered(self, tier: int, node: Node, first: int, last: int) -> None:
        for key in node.page_keys()[first:last]:
            self._tiers[key] = self._tiers.get(key, 0) | 1 << tier

    def leaves(self, tier: int, node: Node, first: int, last: int) -> None:
        for key in node.page_keys()[first:last]:
            left = self._tiers.get(key, 0) & ~(1 << tier)
            if left:
                self._tiers[key] = left
            else:
                self._tiers.pop(key, None)

    def stored(self, keys: Iterable[PageKey]) -> None:
        """The disk is everybody's."""

    def removed(self, keys: Iterable[PageKey]) -> None:
        """As little of interest."""


class Standing(NamedTuple):
    """How a copy stands to a request."""

    cached: int
    """Leading tokens of the prompt that it has, or computes for another."""
    load: int
    """Tokens of the requests under way there."""
    held: int
    """Tokens of the pages that it holds."""


def choose(standings: Sequence[Standing]) -> int:
    """The copy with the least to do for the request and before it; of equals the one that holds least, then the first."""
    emptiest = min(standing.held for standing in standings)

    def cost(place: int) -> tuple[float, int, int]:
        cached, load, held = standings[place]
        room = min(HELD_WEIGHT * (held - emptiest), MOST_FOR_ROOM)
        # What of the prompt is left, but for what is the same everywhere.
        return LOAD_WEIGHT * load + room - cached, held, place

    return min(range(len(standings)), key=cost)


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """A request under way at a copy."""

    replica: int
    keys: Sequence[bytes]
    tokens: int


class Router:
    """Remembers who is under way where. Thread safe."""

    def __init__(self, views: Sequence[PageView], page_size: int) -> None:
        """views: of each copy, by its number."""
        self._views = views
        self._page_size = page_size
        self._expected: list[Counter[bytes]] = [Counter() for _ in views]
        """Pages of the prompts under way: there they will be."""
        self._loads = [0] * len(views)
        self._lock = threading.Lock()

    def route(self, keys: Sequence[bytes], tokens: int) -> Visit:
        """Chooses for a prompt of so many tokens, whose whole pages have these names. `end` what this returns."""
        with self._lock:
            replica = choose([self._standing(i, keys) for i in range(len(self._views))])
            visit = Visit(replica, keys, tokens + ANSWER_TOKENS)
            self._loads[replica] += visit.tokens
            self._expected[replica].update(keys)
        return visit

    def end(self, visit: Visit) -> None:
        """The request has ended."""
        with self._lock:
            self._loads[visit.replica] -= visit.tokens
            expected = self._expected[visit.replica]
            for key in visit.keys:
                expected[key] -= 1
                if not expected[key]:
                    del expected[key]

    @property
    def loads(self) -> list[int]:
        """Tokens under way at each copy."""
        return list(self._loads)

    def _standing(self, replica: int, keys: Sequence[bytes]) -> Standing:
        view, expected = self._views[replica], self._expected[replica]
        found = next((i for i, key in enumerate(keys) if key not in view and key not in expected), len(keys))
        return Standing(found * self._page_size, self._loads[replica], len(view) * self._page_size)
