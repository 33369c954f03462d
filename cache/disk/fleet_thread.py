"""Keeps a replica in touch with the others: reads their notes in a thread of its own, and has the engine's thread take turns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..page_keys import PageKey
from ..policies.policy import Use
from .board import Board
from .fleet import Fleet, News, Orders
from .local import StoreError

_log = logging.getLogger(__name__)


class FleetThread:
    """Owns the thread, which `close` ends. `turn` is for the engine's thread, the only one that `fleet` knows."""

    def __init__(self, board: Board, fleet: Fleet, interval: float, use: Callable[[], Use]) -> None:
        """Becomes known to the others before it returns: what they need not keep is then known here. `use`: the next moment.
        Raises StoreError."""
        self.fleet = fleet
        self._board = board
        self._interval = interval
        self._use = use
        self._changed = threading.Condition()
        self._news: News | None = None
        """Not taken in yet."""
        self._orders: Orders | None = None
        self._closed = False
        self._deleted: tuple[PageKey, ...] = ()
        self._in_order = True
        # Whoever reads the claim after this is waited for by its holder.
        for _ in range(2):
            news = board.read()
            board.carry_out(fleet.turn(news, use()), news.generation)
        self._thread = threading.Thread(target=self._run, name="tierax-fleet", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Takes in the latest news, if there are any; returns at once."""
        if self._news is None:
            return
        with self._changed:
            if self._news is not None:
                self._orders = self.fleet.turn(self._news, self._use())
                self._news = None
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, and says farewell; what the store has under way is waited for, as it has a bound of its own."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        try:
            news = self._board.read()
            self._board.carry_out(self.fleet.farewell(news), news.generation)
        except StoreError as error:
            _log.warning("%s", error)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._cycle()
                self._in_order = True
            except StoreError as error:
                if self._in_order:
                    _log.warning("%s; it is tried again every %g s", error, self._interval)
                self._in_order = False
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._interval)

    def _cycle(self) -> None:
        """Reads what there is, and carries out what the engine's thread says to it. An engine that takes no turns says
        nothing: to the others it is as good as dead, and has newer news when it wakes."""
        news = self._board.read(self._deleted)
        with self._changed:
            self._news, self._orders = news, None
            self._changed.wait_for(lambda: self._orders is not None or self._closed, self._interval)
            self._news, orders = None, self._orders
        if orders is not None:
            self._deleted = ()
            self._deleted = self._board.carry_out(orders, news.generation)
