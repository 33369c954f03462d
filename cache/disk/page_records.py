"""Rows of the host as records of the disk, and back: whole pages, or the KV heads that this process has of them.

What is written depends on how many processes run the model. What is read does not: when a page turns out to be in other
pieces than this process would write, its row is put together from those.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from ..moves import Outcome
from ..page_keys import PageKey
from .names import PartKey, RecordKey
from .record import PAYLOAD_OFFSET, PageLayout, Part, RecordError, inspect, pack, peek, verify
from .share import Heads, Share
from .together import Together

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What this needs of a `PageStore`: all return at once and call `done` exactly once, in any thread."""

    def read_into(
        self, key: RecordKey, buffers: Sequence[memoryview], done: Callable[[Outcome], None]
    ) -> None: ...
    def fetch(self, key: RecordKey, done: Callable[[Outcome, bytes], None]) -> None: ...
    def write(self, key: RecordKey, record: bytes, done: Callable[[Outcome], None]) -> None: ...
    def delete(self, key: RecordKey, done: Callable[[Outcome], None]) -> None: ...
    def note_parts(self, parts: Iterable[PartKey]) -> None: ...


class PageRecords:
    """One process' way to the store. Methods may be called in any thread and do not raise but where they say so."""

    def __init__(self, store: Store, share: Share) -> None:
        self.share = share
        self._store = store
        self._like_ours = True
        """The page that was read last was in the pieces that processes like this one write."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a host row."""
        return self.share.row_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes that are on their way when a row is read."""
        return PAYLOAD_OFFSET + self.row_bytes

    def read(self, key: PageKey, row: int, into: memoryview, done: Callable[[Outcome], None]) -> None:
        """Fills a row: `into` is its memory, which may hold anything unless the outcome is OK."""
        share = self.share
        if not self._like_ours or share.held not in (*share.written, Heads(0, share.heads)):
            self._assemble(key, into, done)
            return
        record, layout = share.record_of(key, share.held)
        header = memoryview(bytearray(PAYLOAD_OFFSET))
        check = partial(self._check, key, record, layout, header, into, done)
        self._store.read_into(record, (header, into), check)

    def pack(self, key: PageKey, row: memoryview) -> bytes:
        """The record that this process writes of a row; empty if it writes none of it. Raises ValueError for a row of another
        size."""
        share = self.share
        own, payload = share.own, row
        if own.end == own.first:
            return b""
        if own != share.held:
            payload = memoryview(bytearray(share.bytes_of(own)))
            share.copy(row, share.held, payload, own)
        return pack(key, share.record_of(key, own)[1], payload)

    def write(self, key: PageKey, record: bytes, done: Callable[[Outcome], None]) -> None:
        """Stores what `pack` gave."""
        if record:
            self._store.write(self.share.record_of(key, self.share.own)[0], record, done)
        else:
            done(Outcome.OK)

    def give_up(self, key: PageKey) -> None:
        """A write that was ordered (see `Mover.write`) comes to nothing, since there is no record."""

    def delete(self, key: PageKey, done: Callable[[Outcome], None]) -> None:
        """Removes a page, with all of its parts."""
        self._store.delete(key, done)

    def _check(
        self,
        key: PageKey,
        record: RecordKey,
        layout: PageLayout,
        header: memoryview,
        into: memoryview,
        done: Callable[[Outcome], None],
        outcome: Outcome,
    ) -> None:
        """Runs in a thread of the store's, which has the time to verify what it has read."""
        try:
            if outcome is Outcome.OK:
                verify(header, into, key, layout)
            elif outcome is Outcome.CORRUPT:
                raise RecordError("length: there are more or fewer bytes than there should be")
            elif outcome is Outcome.MISSING and record != key:
                self._assemble(key, into, done)
                return
        except RecordError as error:
            found = peek(header)
            if found is not None and found.parts != layout.parts:
                self._assemble(key, into, done)
                return
            outcome = _refuse(key, error)
        except Exception:
            outcome = _blame()
        done(outcome)

    # A page that others have written.

    def _assemble(self, key: PageKey, into: memoryview, done: Callable[[Outcome], None]) -> None:
        """Reads the page's own record, and of the others what it takes."""

        def take(outcome: Outcome, record: bytes) -> None:
            wanted: list[Part] = []
            try:
                if outcome is Outcome.OK:
                    layout, payload = self._open(key, record)
                    parts = layout.parts or (Part(0, self.share.heads, layout.page_bytes),)
                    self._check_parts(parts)
                    self._like_ours = layout.parts == self.share.parts
                    self._store.note_parts(PartKey(key, *part[:2]) for part in parts[1:])
                    self._copy(parts[0], payload, into)
                    held = self.share.held
                    wanted = [part for part in parts[1:] if part.first < held.end and held.first < part.end]
            except RecordError as error:
                outcome = _refuse(key, error)
            except Exception:
                outcome = _blame()
            if not wanted:
                done(outcome)
                return
            together = Together(len(wanted), done)
            for part in wanted:
                self._store.fetch(
                    PartKey(key, *part[:2]), partial(self._take_part, key, part, into, together)
                )

        self._store.fetch(key, take)

    def _take_part(
        self,
        key: PageKey,
        part: Part,
        into: memoryview,
        done: Callable[[Outcome], None],
        outcome: Outcome,
        record: bytes,
    ) -> None:
        try:
            if outcome is Outcome.OK:
                layout, payload = self._open(key, record)
                if layout.parts != (part,):
                    raise RecordError(f"other heads: {layout.parts}, expected {part}")
                self._copy(part, payload, into)
        except RecordError as error:
            outcome = _refuse(key, error)
        except Exception:
            outcome = _blame()
        done(outcome)

    def _open(self, key: PageKey, record: bytes) -> tuple[PageLayout, memoryview]:
        found, layout, payload = inspect(record)
        if found != key:
            raise RecordError(f"other key: the record is page {found.key.hex()} at depth {found.depth}")
        wanted = self.share.layout
        if (layout.shape, layout.dtype) != (wanted.shape, wanted.dtype):
            raise RecordError(
                f"other layout: {layout.shape} {layout.dtype}, expected {wanted.shape} {wanted.dtype}"
            )
        return layout, payload

    def _check_parts(self, parts: Sequence[Part]) -> None:
        ends = [0, *(part.end for part in parts)]
        sizes = [self.share.bytes_of(Heads(part.first, part.end)) for part in parts]
        if (
            [part.first for part in parts] != ends[:-1]
            or ends[-1] != self.share.heads
            or sizes != [part.nbytes for part in parts]
        ):
            raise RecordError(f"parts: {parts} are not a page of {self.share.heads} KV heads")

    def _copy(self, part: Part, payload: memoryview, into: memoryview) -> None:
        self.share.copy(payload, Heads(part.first, part.end), into, self.share.held)


def _refuse(key: PageKey, error: RecordError) -> Outcome:
    _log.warning("page %s of the disk cache is not used: %s", key.key.hex(), error)
    return Outcome.CORRUPT


def _blame() -> Outcome:
    # Whatever is wrong with a record, its row must not stay taken.
    _log.exception("a record could not be verified")
    return Outcome.IO_ERROR
