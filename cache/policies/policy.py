"""What an eviction policy is. It only chooses; it never takes part in hit, insert or evict.

A policy of one's own subclasses `EvictionPolicy` with `touch` and `priority`; the other methods have defaults.
One policy object serves one tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, Self


class Evictable(Protocol):
    """What a policy chooses among: a run of pages of the radix tree, or a single page of the disk index.

    Items are told apart by object, not by equality. An item is evictable while nobody uses it and nothing of its tier
    hangs below it. A run may be cut in two, of which both halves get its rank, and may grow; runs lose pages at the tail.
    """

    rank: Any
    """What the policy remembers of the item, an immutable value; None until the first touch."""

    @property
    def end(self) -> int:
        """Depth of its last page: the pages from the start of the sequence to there, it included."""
        ...

    @property
    def size(self) -> int:
        """Pages that it holds in its tier."""
        ...

    @property
    def identity(self) -> Hashable:
        """Names the tokens, with all that came before them: the same when they come back in another item."""
        ...

    @property
    def identities(self) -> Sequence[Hashable]:
        """Of each of its pages, as `identity` is of the first one."""
        ...

    @property
    def head(self) -> Evictable | None:
        """The item that it hangs below; None at the start of a sequence."""
        ...


class Use(NamedTuple):
    """One moment, in both senses that a policy may need."""

    tick: int
    """Logical time: it grows with every use."""
    now: float
    """Seconds of the injected clock."""


class EvictionPolicy(ABC):
    """Chooses what leaves a tier when room is needed."""

    lanes: int = 1
    """Into how many lanes the waiting items are sorted; `choose` picks the lane before `priority` picks the item."""
    capacity: int = 0
    """Pages that the tier has room for, those in use and those that others hang below among them; it says so before it needs room."""

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        """The policy for `name` (None) or `name=option` on a command line. Raises ValueError for a bad option."""
        if option is not None:
            raise ValueError("it takes no option")
        return cls()

    @abstractmethod
    def touch(self, item: Evictable, use: Use) -> None:
        """The item was used, or put into the tier and touched for the first time.

        Every item of a path is touched with the same `use`, heads before tails, so that what is part of a longer hit
        counts as used. Called only while the item does not wait to be evicted.
        """

    @abstractmethod
    def priority(self, item: Evictable) -> Any:
        """Least goes first (any values that compare with each other); of equals the deeper one, then the one that
        waits longer.

        Asked once, when the item becomes evictable: the answer must hold until the next `touch` or `spare`, also
        when the head of the run is cut off meanwhile.
        """

    def lane(self, item: Evictable) -> int:
        """The lane in which the item waits, below `lanes`; asked together with `priority`, and as lasting."""
        return 0

    def choose(self, firsts: Sequence[Evictable | None], pages: Sequence[int], use: Use) -> int:
        """The lane that gives an item next, told the first item of each (None: it is empty) and how many pages wait
        there; an empty one passes to the first that is not. Not asked where there is one lane only.
        """
        return 0

    def spare(self, item: Evictable, use: Use) -> bool:
        """Asked about the item that is to go next: True keeps it this once, with the rank that this method has set.

        It must not spare for ever; the queue bounds the spares for one eviction.
        """
        return False

    def at_a_time(self, item: Evictable) -> int | None:
        """How many pages may leave at the tail of the item that goes next, before the policy is asked again; None: as many
        as are needed. What is left of it waits again, with a new `lane` and `priority`.
        """
        return None

    def evicted(self, item: Evictable) -> None:
        """The item leaves the tier as a whole; it still has its pages, depth and identity."""
        return

    def expires(self, item: Evictable) -> float | None:
        """Seconds of the clock from which on the item is dropped even when there is room; None: never.

        Asked together with `priority`, and as lasting. What hangs below an item must not outlive it.
        """
        return None
