"""How many tokens a program may still add, all its branches together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from .errors import BudgetError


@dataclass(slots=True)
class Room:
    """What an answer was given of a budget."""

    granted: int
    used: int = 0


class Budget:
    """Counts every token of a program once, when it is added: its texts', its choices' and the model's.

    A bound that holds: an answer reserves its `max_tokens` and gives back what it did not need. Where less than that is
    left it waits for the reservations of other branches, and is cut short only if nobody has any. Used in one event loop.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Raises ValueError for a limit below 1."""
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ValueError(f"max_total_tokens must be a whole number of at least 1, not {limit!r}")
        self.limit = limit
        self.used = 0
        self._reserved = 0
        self._changed = asyncio.Condition()

    def spend(self, tokens: int, where: str | None) -> None:
        """Tokens of a text. Raises `BudgetError` if there are not so many left."""
        if self.limit is not None and self.used + tokens > self.limit:
            raise BudgetError(
                f"{tokens} more tokens do not fit: {self.used} of the program's max_total_tokens {self.limit}"
                " are used",
                where,
            )
        self.used += tokens

    @asynccontextmanager
    async def room(self, wanted: int, where: str) -> AsyncIterator[Room]:
        """Room for an answer; `used` is to be set. Raises `BudgetError` if nothing is left."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._left() >= wanted or not self._reserved)
            room = Room(int(min(wanted, self._left())))
            if room.granted < 1:
                raise self.exhausted(where)
            self._reserved += room.granted
        try:
            yield room
        finally:
            self._reserved -= room.granted
            self.used += room.used
            # Not to be interrupted, whatever ends the answer: others wait for this.
            await asyncio.shield(self._tell())

    def exhausted(self, where: str) -> BudgetError:
        """What to raise where an answer found too little."""
        return BudgetError(f"the program has used its max_total_tokens of {self.limit}", where)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _left(self) -> float:
        return float("inf") if self.limit is None else self.limit - self.used - self._reserved
