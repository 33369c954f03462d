"""Prefixes that are to stay on the host, whatever its eviction policy says: who holds them, and how much they may take.

A pin is whole when it is made. A fault of the device voids its hold; `restore` takes a new one on what the host kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from .leases import Hold
from .manager import CacheManager
from .page_keys import KEY_BYTES


class PinError(Exception):
    """A prefix that cannot be pinned; the message says why, with the numbers, `code` in one word."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class Pin:
    """A pinned prefix: the whole pages of `tokens` in a namespace."""

    id: str
    """The key of its last page, in hex: the same for the same prefix."""
    namespace: bytes
    tokens: array[int]
    pages: int
    hold: Hold

    @property
    def held_pages(self) -> int:
        """Pages that are really held: fewer than `pages` only after a fault of the device."""
        return self.hold.num_pages


class Pins:
    """The pins of a cache, which take at most `share` of its host pages. Used by the one thread that owns the cache."""

    def __init__(self, cache: CacheManager, share: float, *, staging_only: bool = False) -> None:
        """`staging_only`: the host pages are no cache, but what the disk is read and written through."""
        if not 0 <= share <= 1:
            raise ValueError(f"the share of host pages that may be pinned is from 0 to 1, got {share}")
        self._cache = cache
        self._usable = cache.enabled and cache.host.num_pages > 0 and not staging_only
        self.quota_pages = int(cache.host.num_pages * share) if self._usable else 0
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        """In the order of pinning."""
        return iter(self._pins.values())

    @property
    def pages(self) -> int:
        """Host pages that pins hold; what several share counts once."""
        return self.pages_of(None)

    def pages_of(self, digest: bytes | None) -> int:
        """The same for one namespace, by the digest that its page keys start from; None = for all."""
        cache = self._cache
        holds = [pin.hold for pin in self if pin.hold.node is not None]
        rows = [
            cache.rows(hold, 0, hold.num_pages)
            for hold in holds
            if digest in (None, cache.root(hold.namespace).page_keys()[0])
        ]
        return len({row for held in rows for row in held})

    def check(self, namespace: bytes, tokens: array[int]) -> None:
        """Raises `PinError` if `pin` would for want of a host cache, of a whole page, or of quota."""
        wanted = len(tokens) // self._cache.page_size
        if not self._usable:
            raise PinError(
                "no_host_cache", "There is no host cache to pin into; start with --host-cache-size."
            )
        if wanted == 0:
            raise PinError(
                "too_short",
                f"Only whole pages of {self._cache.page_size} tokens can be pinned; these are {len(tokens)} tokens.",
            )
        more, held = wanted - self._shared(namespace, tokens), self.pages
        if self.id_of(namespace, tokens) not in self._pins and held + more > self.quota_pages:
            raise PinError(
                "pin_quota_exceeded",
                f"{more} more pages would be pinned, but {held} of the {self.quota_pages} that may be are pinned already;"
                " unpin something, or raise --pin-quota.",
            )

    def pin(self, namespace: bytes, tokens: array[int]) -> Pin:
        """Holds the whole pages of `tokens`, which device or host must have. The same prefix again is the same pin.

        Raises `PinError`, and pins nothing then.
        """
        self.check(namespace, tokens)
        pin_id, wanted = self.id_of(namespace, tokens), len(tokens) // self._cache.page_size
        hold = self._cache.hold(namespace, tokens, len(tokens), save=True)
        if hold.num_pages < wanted:
            held = hold.num_pages
            self._cache.drop(hold)
            raise PinError(
                "not_cached",
                f"Only {held} of {wanted} pages could be brought to the host: the others were not cached any more, or"
                " the rest of the host was in use. Try again.",
            )
        old = self._pins.pop(pin_id, None)
        if old is not None:
            self._release(old)
        pin = self._pins[pin_id] = Pin(pin_id, namespace, tokens, wanted, hold)
        return pin

    def unpin(self, pin_id: str) -> Pin:
        """Lets go of a pin; its pages become evictable. Raises KeyError for an id that there is not."""
        pin = self._pins.pop(pin_id)
        self._release(pin)
        return pin

    def id_of(self, namespace: bytes, tokens: array[int]) -> str:
        """The id that a pin of these tokens has."""
        count = len(tokens) // self._cache.page_size
        names = self._cache.page_names(namespace, tokens, count)
        return names[-1].key.hex() if names else "0" * 2 * KEY_BYTES

    def restore(self) -> int:
        """Holds again what a fault of the device let go, as far as the host has it; returns the pins that are not whole."""
        incomplete = 0
        for pin in self:
            if pin.hold.node is None:
                pin.hold = self._cache.hold(pin.namespace, pin.tokens, len(pin.tokens))
            else:
                self._cache.extend_hold(pin.hold, pin.tokens, len(pin.tokens))
            incomplete += pin.held_pages < pin.pages
        return incomplete

    def _shared(self, namespace: bytes, tokens: array[int]) -> int:
        """How many leading pages of `tokens` another pin holds already."""
        size = self._cache.page_size
        most = 0
        for pin in self:
            if pin.namespace == namespace:
                both = range(0, min(pin.held_pages * size, len(tokens) // size * size), size)
                same = (tokens[at : at + size] == pin.tokens[at : at + size] for at in both)
                most = max(most, sum(1 for _ in takewhile(bool, same)))
        return most

    def _release(self, pin: Pin) -> None:
        if pin.hold.node is not None:
            self._cache.drop(pin.hold)
