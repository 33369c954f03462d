"""Pieces of text on their way from the backend's loop to whoever iterates over them, in any thread or loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text; `name` is that of the place it belongs to, None for the program's own texts."""

    name: str | None
    text: str
    last: bool = False
    """The place is filled."""


class Feed:
    """Keeps all pieces, so that several may iterate, and begin late."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._ended = False
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], object]] = []

    def add(self, piece: Piece) -> None:
        """Passes a piece on."""
        with self._changed:
            self._pieces.append(piece)
            self._wake()

    def end(self) -> None:
        """No piece will follow."""
        with self._changed:
            self._ended = True
            self._wake()

    def pieces(self) -> Iterator[Piece]:
        """All pieces up to the end, as they come."""
        at = 0
        while True:
            with self._changed:
                while not self._ended and len(self._pieces) == at:
                    self._changed.wait()
                fresh = self._pieces[at:]
            if not fresh:
                return
            at += len(fresh)
            yield from fresh

    async def pieces_async(self) -> AsyncIterator[Piece]:
        """The same for an event loop, which is not blocked."""
        loop, fresh_ones = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(fresh_ones.set)

        with self._changed:
            self._wakers.append(wake)
        try:
            at = 0
            while True:
                fresh_ones.clear()
                with self._changed:
                    fresh, ended = self._pieces[at:], self._ended
                if not fresh and ended:
                    return
                if not fresh:
                    await fresh_ones.wait()
                at += len(fresh)
                for piece in fresh:
                    yield piece
        finally:
            with self._changed:
                self._wakers.remove(wake)

    def _wake(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()
