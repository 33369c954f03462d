"""Records of a page whose KV heads several processes have: process 0 decides for all, and answers for all.

    process 0                            the others
    a write was asked for       pack -->  keep the row's heads as a record of theirs
    its turn has come          store -->  store that record
    all have stored theirs           <--  done
    store the page's own record: from now on the page is there

    a row is wanted             read -->  fill the row with their heads
    the row is filled everywhere     <--  done

So a page is there when all of its parts are, a row is filled when it is so in all processes, and whatever fails anywhere
has failed for all. What is sent must arrive in the order in which it was sent, together with commands to the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..moves import Outcome
from ..page_keys import PageKey
from .names import PartKey, page_name
from .order import WriteOrder
from .page_records import PageRecords, Store
from .share import Share
from .together import Together


class TeamRecords(PageRecords):
    """Process 0's. The others answer through `heard`."""

    def __init__(self, store: Store, share: Share, others: int, send: Callable[..., None]) -> None:
        """`send` tells all others a command and its arguments: numbers, lists, strings, bytes."""
        super().__init__(store, share)
        self._others = others
        self._send = send
        self._order = WriteOrder()
        self._lock = threading.Lock()
        self._numbers = 0
        self._waiting: dict[int, Together] = {}
        """By number, the answers of the others."""
        self._ordered: dict[PageKey, deque[int]] = {}
        """Numbers of the writes that have been asked for, and whose turn has not come."""

    def order(self, key: PageKey, row: int) -> None:
        """A write was asked for, of what the row has after all commands before."""
        number = self._await(Together(self._others))
        with self._lock:
            self._ordered.setdefault(key, deque()).append(number)
        self._send("pack", number, list(key), row)

    def heard(self, number: int, outcome: str) -> None:
        """One of the others has done what has this number; each says so once."""
        with self._lock:
            answers = self._waiting[number]
        answers(Outcome(outcome))

    def read(self, key: PageKey, row: int, into: memoryview, done: Callable[[Outcome], None]) -> None:
        together = Together(1 + self._others)
        number = self._await(together)
        self._send("read", number, list(key), row)
        super().read(key, row, into, together)
        self._take_answers(number, done)

    def write(self, key: PageKey, record: bytes, done: Callable[[Outcome], None]) -> None:
        number, name = self._take_number(key), page_name(key)

        def end(outcome: Outcome) -> None:
            self._order.finish(name)
            done(outcome)

        def commit(outcome: Outcome) -> None:
            if outcome is Outcome.OK:
                super(TeamRecords, self).write(key, record, end)
            else:
                end(outcome)

        def start() -> None:
            self._store.note_parts(PartKey(key, *part[:2]) for part in self.share.parts[1:])
            self._send("store", number)
            self._take_answers(number, commit)

        # Nobody stores a part before what was deleted earlier is gone.
        self._order.submit(name, start)

    def give_up(self, key: PageKey) -> None:
        number = self._take_number(key)
        self._send("drop", number)
        self._take_answers(number, lambda outcome: None)

    def delete(self, key: PageKey, done: Callable[[Outcome], None]) -> None:
        name = page_name(key)

        def end(outcome: Outcome) -> None:
            self._order.finish(name, deletes=True)
            done(outcome)

        self._order.submit(name, lambda: super(TeamRecords, self).delete(key, end), deletes=True)

    def _await(self, answers: Together) -> int:
        with self._lock:
            self._numbers += 1
            self._waiting[self._numbers] = answers
            return self._numbers

    def _take_answers(self, number: int, done: Callable[[Outcome], None]) -> None:
        """Has `done` called with the worst of them, once all are there."""

        def take(outcome: Outcome) -> None:
            with self._lock:
                del self._waiting[number]
            done(outcome)

        self._waiting[number].then(take)

    def _take_number(self, key: PageKey) -> int:
        with self._lock:
            numbers = self._ordered[key]
            number = numbers.popleft()
            if not numbers:
                del self._ordered[key]
        return number


class MemberRecords(PageRecords):
    """Another process': a record waits here until process 0 has it stored, or dropped."""

    def __init__(self, store: Store, share: Share) -> None:
        super().__init__(store, share)
        self._lock = threading.Lock()
        self._ordered: dict[PageKey, deque[int]] = {}
        self._decided: dict[int, bool] = {}
        self._packed: dict[int, Callable[[bool], None]] = {}
        """By number of the write, what has come first: whether it is to be stored, or who wants to know."""

    def order(self, number: int, key: PageKey) -> None:
        """The mover is about to be asked for this write, which process 0 knows by this number."""
        with self._lock:
            self._ordered.setdefault(key, deque()).append(number)

    def decide(self, number: int, *, store: bool) -> None:
        """Process 0 has the record stored, or dropped."""
        with self._lock:
            take = self._packed.pop(number, None)
            if take is None:
                self._decided[number] = store
        if take is not None:
            take(store)

    def write(self, key: PageKey, record: bytes, done: Callable[[Outcome], None]) -> None:
        def take(store: bool) -> None:
            if store:
                super(MemberRecords, self).write(key, record, done)
            else:
                done(Outcome.CANCELLED)

        self._when_decided(key, take)

    def give_up(self, key: PageKey) -> None:
        self._when_decided(key, lambda store: None)

    def _when_decided(self, key: PageKey, take: Callable[[bool], None]) -> None:
        with self._lock:
            numbers = self._ordered[key]
            number = numbers.popleft()
            if not numbers:
                del self._ordered[key]
            decided = self._decided.pop(number, None)
            if decided is None:
                self._packed[number] = take
        if decided is not None:
            take(decided)


def page_key(fields: list[Any]) -> PageKey:
    """A key as it comes out of a message."""
    namespace, key, parent, depth = fields
    return PageKey(bytes(namespace), bytes(key), bytes(parent), int(depth))
