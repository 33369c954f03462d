"""Copies of a request's prefix from the host to the device, once it has a lease: the last part of its way up (prefetch.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cache.leases import Hold
from ..cache.manager import CacheManager
from ..cache.moves import Move, Mover
from .request import Request, held_lease


@dataclass(slots=True, eq=False)
class _Load:
    """A copy from host to device, or the wait for another request's copy of the same pages."""

    hold: Hold
    first: int
    last: int
    rows: list[int]
    move: Move | None
    after: _Load | None = None
    deadline: float | None = None

    @property
    def done(self) -> bool:
        return self.move is None or self.move.done


class Loads:
    """Those under way, at most one for each request. None takes longer than `max_wait` seconds: what has not arrived by then
    is computed."""

    def __init__(
        self, cache: CacheManager, mover: Mover, *, max_wait: float, order_saves: Callable[[], None]
    ) -> None:
        """`order_saves` orders the copies to the host that are owed, before the mover hears of rows that they fill."""
        self._cache = cache
        self._mover = mover
        self._max_wait = max_wait
        self._order_saves = order_saves
        self._loads: dict[Request, _Load] = {}

    @property
    def busy(self) -> bool:
        return bool(self._loads)

    def loadable(self, request: Request) -> bool:
        """Whether the host has more of the prompt than the device."""
        match = self._cache.match(request.namespace, request.tokens, request.reusable)
        return match.host > match.device

    def load(self, request: Request) -> bool:
        """Begins to copy what the host has beyond the lease, or to wait for another request that copies it; False if there
        is nothing to copy, or no room."""
        cache, lease, size = self._cache, held_lease(request), self._cache.page_size
        hold = cache.hold(request.namespace, request.tokens, request.reusable)
        first, last = lease.num_shared, hold.num_pages
        rows = cache.rows(hold, first, last)
        other = next((load for load in self._loads.values() if rows and rows[0] in load.rows), None)
        if other is not None and not other.done:
            self._loads[request] = _Load(hold, first, first, [], None, other)
            return True
        if not rows or not cache.grow(lease, last * size):
            cache.drop(hold, leased=True)
            return False
        self._order_saves()
        move = self._mover.load(rows, lease.pages[first:last])
        self._loads[request] = _Load(hold, first, last, rows, move)
        return True

    def loaded(self, request: Request, now: float) -> bool:
        """Whether the copy is over; what has arrived belongs to the lease then."""
        load = self._loads[request]
        if load.deadline is None:
            # Not from its arrival: what came up while the request waited for the disk, or for its turn, is to be used.
            load.deadline = now + self._max_wait
        late = now >= load.deadline
        if load.after is not None:
            if not (load.after.done or late):
                return False
            self.unload(request)
            self._cache.extend(held_lease(request), request.tokens, request.reusable)
            return late or not self.load(request)
        assert load.move is not None
        if not (load.move.done or late):
            return False
        arrived = load.first + load.move.good
        self.unload(request)
        if arrived > load.first:
            self._cache.commit(held_lease(request), request.tokens, arrived * self._cache.page_size)
        return True

    def unload(self, request: Request) -> None:
        """Wants no load any more: what has not reached the device yet will not."""
        load = self._loads.pop(request, None)
        if load is not None:
            if load.move is not None and not load.move.done:
                self._mover.cancel(load.move)
            self._cache.drop(load.hold, leased=True)

    def reset(self) -> None:
        """The device was lost, and with it every hold."""
        self._loads.clear()
