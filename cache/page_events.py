"""What enters and leaves the tiers, for whoever keeps a picture of them elsewhere: a router, say.

The tree and the disk's index tell a `PageListener` of every page, at the places where pages come and go. A `PageLog`
is the listener that keeps what it hears until another thread takes it: the engine's thread never waits for anybody,
and what a slow taker misses is known to be missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .page_keys import PageKey

if TYPE_CHECKING:
    from .disk.index import DiskIndex
    from .radix_tree import Node
    from .tiered_tree import TieredTree

DISK = 2
"""The tier below DEVICE and HOST, which the tree does not know."""


class PageListener(Protocol):
    """Called in the thread that owns the cache; must return at once and change nothing."""

    def entered(self, tier: int, node: Node, first: int, last: int) -> None:
        """DEVICE or HOST holds pages `[first, last)` of a node's run from now on."""
        ...

    def leaves(self, tier: int, node: Node, first: int, last: int) -> None:
        """It holds them no longer in a moment."""
        ...

    def stored(self, keys: Iterable[PageKey]) -> None:
        """The disk holds these pages from now on."""
        ...

    def removed(self, keys: Iterable[PageKey]) -> None:
        """It holds them no longer."""
        ...


class _Several:
    """A `PageListener` that tells others."""

    def __init__(self, listeners: Sequence[PageListener]) -> None:
        self._listeners = listeners

    def entered(self, tier: int, node: Node, first: int, last: int) -> None:
        for listener in self._listeners:
            listener.entered(tier, node, first, last)

    def leaves(self, tier: int, node: Node, first: int, last: int) -> None:
        for listener in self._listeners:
            listener.leaves(tier, node, first, last)

    def stored(self, keys: Iterable[PageKey]) -> None:
        for listener in self._listeners:
            listener.stored(keys)

    def removed(self, keys: Iterable[PageKey]) -> None:
        for listener in self._listeners:
            listener.removed(keys)


def listeners(those: Sequence[PageListener]) -> PageListener | None:
    """One that tells all of these."""
    return _Several(those) if len(those) > 1 else next(iter(those), None)


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages that follow each other entered a tier."""

    tier: int
    keys: Sequence[bytes]
    parent: bytes | None
    """The key of the page before the first; None if there is none."""
    tokens: bytes
    """Their token ids (i32); empty where they are unknown (disk) or nobody's business (another tenant's)."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages left a tier."""

    tier: int
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing that was told before counts any more; all that there is is told anew after this."""


PageEvent = Stored | Removed | Cleared


class Taken(NamedTuple):
    """What a `PageLog` heard since it was last asked, oldest first; `lost`: some of what came after that is missing."""

    events: list[PageEvent]
    lost: bool


class PageLog:
    """A bounded queue of page events. One thread listens and fills, another one calls `take`.

    Token ids are kept of the namespaces in `told` only: what a tenant of its own has asked stays with it.
    """

    def __init__(self, capacity: int, told: Collection[bytes]) -> None:
        """`capacity`: events that may wait to be taken, beside those of `tell_all`."""
        self._capacity = capacity
        self._told = frozenset(told)
        self._events: deque[PageEvent] = deque()
        self._lost = False
        self._closed = False

    def close(self) -> None:
        """Hears nothing from now on. May be called by any thread."""
        self._closed = True
        self._events.clear()

    def take(self, most: int) -> Taken:
        """Up to `most` events. When `lost`, the picture is whole again only after the next `Cleared`."""
        lost, events = self._lost, []
        while self._events and len(events) < most:
            events.append(self._events.popleft())
        return Taken(events, lost and not self._events)

    def tell_all(self, tree: TieredTree, index: DiskIndex | None) -> None:
        """Says `Cleared` and then all that there is, which mends what was lost. In the thread that owns the cache."""
        self._lost = False
        self._events.clear()
        self._events.append(Cleared())
        for node in tree.tree.nodes():
            for tier, run in enumerate(node.runs):
                if run.pages:
                    self._events.append(self._stored(tier, node, 0, len(run.pages)))
        if index is not None:
            self._events.extend(_on_disk(key) for key in index.stored_keys())

    # PageListener.

    def entered(self, tier: int, node: Node, first: int, last: int) -> None:
        if self._has_room():
            self._events.append(self._stored(tier, node, first, last))

    def leaves(self, tier: int, node: Node, first: int, last: int) -> None:
        if self._has_room():
            self._events.append(Removed(tier, node.page_keys()[first:last]))

    def stored(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            if self._has_room():
                self._events.append(_on_disk(key))

    def removed(self, keys: Iterable[PageKey]) -> None:
        names = [key.key for key in keys]
        if names and self._has_room():
            self._events.append(Removed(DISK, names))

    def _has_room(self) -> bool:
        """Once something is lost, nothing is kept until all is told anew: it would only mislead."""
        if not self._closed and len(self._events) >= self._capacity:
            self._lost = True
        return not (self._closed or self._lost)

    def _stored(self, tier: int, node: Node, first: int, last: int) -> Stored:
        keys, path = node.page_keys(), node.path()
        if first > 0:
            parent = keys[first - 1]
        else:
            # A root's only key is the digest of its namespace, which is no page.
            parent = None if len(path) == 2 else path[-2].page_keys()[-1]
        tokens = b""
        if bytes(path[0].key) in self._told:
            tokens = bytes(node.key[first * node.page_bytes : last * node.page_bytes])
        return Stored(tier, keys[first:last], parent, tokens)


def _on_disk(key: PageKey) -> Stored:
    return Stored(DISK, (key.key,), key.parent if key.depth else None, b"")
