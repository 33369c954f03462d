"""Pages in a directory or an object store, through tensorstore's key-value interface. names.py has their names."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import tensorstore as ts

from ..moves import Outcome
from ..page_keys import PageKey
from .local import StoreError, local_path, open_directory, sweep_locks, write_file
from .names import PartKey, RecordKey, Stored, parse_page_name, parse_part_name, record_name
from .order import WriteOrder
from .outcomes import PATIENCE_S, classify, plain
from .papers import Papers
from .readers import copy_into, read_file_into
from .threads import Threads
from .together import Together

__all__ = ["PageStore", "StoreError", "Stored", "classify"]

_log = logging.getLogger(__name__)

READ_CONCURRENCY = 3
"""Fewer leave a cold disk waiting; more take the interpreter from each other when files are in memory (docs/log.md)."""
WRITE_CONCURRENCY = 4
WRITE_THREADS = 2
"""Of a directory, whose files go to the system's cache: they rarely wait for a disk."""


Fetched = Callable[[], bytes]
"""A record that was read; the call makes its bytes."""


class PageStore:
    """Records of pages, and of parts of pages, by key. `read`, `write` and `delete` return at once and never raise; the other methods wait.

    `url` is a directory (`~` is expanded; made with mode 0700 if absent, unless `read_only`), or a URL of tensorstore's:
    `file://`, `s3://`, `gs://`, `memory://` (a store of its own for each `PageStore`), or a whole tensorstore spec as
    JSON, for endpoints and credentials. A directory that is not writable becomes `read_only`, with a warning. Raises
    StoreError otherwise.

    A record is visible only when it is whole: files are renamed into place. They are not synced: after a power cut a
    renamed file may lack bytes, which the record's checksum tells.

    `read_concurrency` files are read at once; further calls queue. Writes have threads of their own, so that reads never
    wait for them, and take the processor time that others leave. Methods may be called from any thread.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        read_only: bool = False,
        read_concurrency: int = READ_CONCURRENCY,
    ) -> None:
        self.url = os.fspath(url)
        self.read_only = read_only
        self.local = local_path(self.url)
        """The directory, where there is one."""
        try:
            if self.local is not None and not open_directory(self.local, create=not read_only):
                self.read_only = True
                if not read_only:
                    _log.warning(
                        "disk cache %s is not writable: it is read, but nothing is stored", self.local
                    )
            self._reads = self._open(read_concurrency)
            # The one handle of a memory store is its contents.
            self._writes = self._reads if self.local is None else self._open(WRITE_CONCURRENCY)
        except (OSError, ValueError) as error:
            raise StoreError(f"disk cache {self.url}: {plain(error)}") from error
        if self.local is not None and not self.read_only:
            sweep_locks(self.local)
        self.papers = Papers(self.url, self.local, self._reads, self._writes, read_only=self.read_only)
        """What it keeps beside its pages."""
        self._readers = Threads("tierax-reads", read_concurrency)
        self._writers = Threads("tierax-writes", WRITE_THREADS, background=True)
        self._parts: dict[bytes, set[PartKey]] = {}
        """By the key of their page, those that it is deleted with."""
        self._parts_lock = threading.Lock()
        self._order = WriteOrder()
        self._idle = threading.Condition()
        self._in_flight = 0
        self._closing = False
        self._closed = False

    def _open(self, concurrency: int) -> ts.KvStore:
        context = ts.Context(
            {
                "file_io_concurrency": {"limit": concurrency},
                # The default of 32 retries with growing pauses would hide a lost network for many minutes.
                "s3_request_retries": {"max_retries": 4},
                "gcs_request_retries": {"max_retries": 4},
            }
        )
        spec: Any = self.url
        if self.local is not None:
            spec = {"driver": "file", "path": f"{self.local}/", "file_io_sync": False}
        elif spec.startswith("{"):
            spec = json.loads(spec)
        store = ts.KvStore.open(spec, context=context).result(timeout=PATIENCE_S)
        if store.path and not store.path.endswith("/"):
            store.path += "/"
        return store

    # The three movements.

    def read(self, key: RecordKey, done: Callable[[Outcome, Fetched | None], None]) -> None:
        """Fetches a record of any length; `done(outcome, fetched)` is called exactly once, in a thread of the store's or
        in this one, with something only if the outcome is OK: `fetched()` makes the record's bytes, which is a copy and
        not for the store's threads, which have others to read. The record has not been checked: `record.unpack` does
        that.

        `done` should be quick, and must not raise or call `close`.
        """
        if self._begin():
            self._fetch(key, partial(self._end, done))
        else:
            done(Outcome.CANCELLED, None)

    def fetch(self, key: RecordKey, done: Callable[[Outcome, bytes], None]) -> None:
        """As `read`, with bytes made by a thread that has the time, so that `done` may take its time too. They are empty
        unless the outcome is OK."""

        def take(outcome: Outcome, record: Fetched | None) -> None:
            self._readers.submit(lambda: done(outcome, b"" if record is None else record()))

        self.read(key, take)

    def probe(self, key: RecordKey, done: Callable[[Outcome], None]) -> None:
        """Whether there is a record, whatever it holds: OK or MISSING; `done(outcome)` as for `read`."""
        if self._begin():
            self._fetch(key, lambda outcome, _: self._end(done, outcome), slice(0, 1))
        else:
            done(Outcome.CANCELLED)

    def read_into(
        self, key: RecordKey, buffers: Sequence[memoryview], done: Callable[[Outcome], None]
    ) -> None:
        """Reads a record into `buffers`, one after the other; `done(outcome)` as for `read`, but it may take its time.

        A record that is not exactly as long as they are is CORRUPT, and they hold of it what goes in. They may hold
        anything when the outcome is another one.
        """

        def take(outcome: Outcome, record: Fetched | None) -> None:
            if record is None:
                self._end(done, outcome)
            else:
                self._readers.submit(lambda: self._end(done, copy_into(record(), buffers)))

        if not self._begin():
            done(Outcome.CANCELLED)
        elif self.local is None:
            self._fetch(key, take)
        else:
            path = f"{self.local}/{record_name(key)}"
            self._readers.submit(lambda: self._end(done, self._read_file(path, buffers)))

    def _fetch(
        self, key: RecordKey, then: Callable[[Outcome, Fetched | None], None], part: slice | None = None
    ) -> None:
        """Has tensorstore read a record, or some bytes of it."""

        def complete(future: ts.Future) -> None:
            outcome, record = Outcome.OK, None
            try:
                result = future.result()
                if result.state == "value":
                    record = partial(getattr, result, "value")
                else:
                    outcome = Outcome.MISSING
            except Exception as error:
                outcome = classify(error)
            then(outcome, record)

        try:
            future = self._reads.read(record_name(key), byte_range=part)
        except Exception as error:
            then(classify(error), None)
        else:
            future.add_done_callback(complete)

    def _read_file(self, path: str, buffers: Sequence[memoryview]) -> Outcome:
        if self._closed:
            return Outcome.CANCELLED
        try:
            return read_file_into(path, buffers)
        except Exception as error:
            return classify(error)

    def write(self, key: RecordKey, record: bytes, done: Callable[[Outcome], None]) -> None:
        """Stores a record, in place of any that is there; `done(outcome)` as for `read`.

        It starts only after the deletes called before it, and after earlier writes of the same key.
        """
        if isinstance(key, PartKey):
            self.note_parts([key])
        self._change(key, record, done)

    def delete(self, key: RecordKey, done: Callable[[Outcome], None]) -> None:
        """Removes a record after earlier writes of the same key, and with a page the parts of it that are known: those
        that were listed, written or noted here. What is absent is no error. `done` as for `read`."""
        parts = set() if isinstance(key, PartKey) else self._take_parts(key.key)

        def end(outcome: Outcome) -> None:
            if outcome is not Outcome.OK:
                self.note_parts(parts)
            done(outcome)

        together = Together(1 + len(parts), end)
        for record in (key, *parts):
            self._change(record, None, together)

    def note_parts(self, parts: Iterable[PartKey]) -> None:
        """There may be these parts of pages: somebody else has written them, or is about to."""
        with self._parts_lock:
            for part in parts:
                self._parts.setdefault(part.page.key, set()).add(part)

    def _take_parts(self, page: bytes) -> set[PartKey]:
        with self._parts_lock:
            return self._parts.pop(page, set())

    def _change(self, key: RecordKey, record: bytes | None, done: Callable[[Outcome], None]) -> None:
        name, deletes = record_name(key), record is None
        if self.read_only:
            done(Outcome.DENIED)
            return
        if not self._begin():
            done(Outcome.CANCELLED)
            return

        def end(outcome: Outcome) -> None:
            self._order.finish(name, deletes=deletes)
            self._end(done, outcome)

        def complete(finish: Callable[[], Any]) -> None:
            try:
                finish()
            except Exception as error:
                outcome = classify(error)
                # Only a read can miss: a write whose folder went away has simply failed.
                end(Outcome.IO_ERROR if outcome is Outcome.MISSING else outcome)
            else:
                end(Outcome.OK)

        def write_here() -> None:
            assert record is not None
            if self._closed:
                end(Outcome.CANCELLED)
            else:
                complete(partial(write_file, f"{self.local}/{name}", record))

        def start() -> None:
            if self._closed:
                end(Outcome.CANCELLED)
            elif self.local is not None and not deletes:
                self._writers.submit(write_here)
            else:
                try:
                    future = self._writes.write(name, record)
                except Exception as error:
                    end(classify(error))
                else:
                    future.add_done_callback(lambda future: complete(future.result))

        self._order.submit(name, start, deletes=deletes)

    # What is there.

    def list(self) -> Iterator[Stored]:
        """All pages, in no order; those that go away meanwhile may be among them. Raises StoreError."""
        names = self.papers.names()
        parts = [part for name in names if (part := parse_part_name(name)) is not None]
        self.note_parts(parts)
        of_parts: dict[PageKey, int | None] = {}
        for part in parts:
            of_parts[part.page] = _sum(of_parts.get(part.page, 0), self._size(part))
        for name in names:
            key = parse_page_name(name)
            if key is None:
                continue
            nbytes = self._size(key)
            if nbytes is None and self.local is not None:
                continue
            yield Stored(key, _sum(nbytes, of_parts.pop(key, 0)))
        for key, nbytes in of_parts.items():
            yield Stored(key, nbytes, only_parts=True)

    def _size(self, key: RecordKey) -> int | None:
        """Bytes of a record; None where the store does not tell, or has it no longer."""
        if self.local is None:
            return None
        try:
            return (self.local / record_name(key)).stat().st_size
        except OSError:
            return None

    def free_bytes(self) -> int | None:
        """Bytes that the file system has left for us; None for stores that are no directory, or cannot be asked."""
        if self.local is None:
            return None
        try:
            return shutil.disk_usage(self.local).free
        except OSError:
            return None

    def close(self, timeout: float = 10.0) -> bool:
        """Refuses new movements (as cancelled) and waits for those called before; False if some have not ended.

        Of these, the ones that have not started are cancelled; the others still call their `done` when they end.
        """
        with self._idle:
            self._closing = True
            drained = self._idle.wait_for(lambda: self._in_flight == 0, timeout)
            self._closed = True
        self._readers.close(wait=drained)
        self._writers.close(wait=drained)
        return drained

    def _begin(self) -> bool:
        with self._idle:
            if self._closing:
                return False
            self._in_flight += 1
            return True

    def _end(self, done: Callable[..., None], *result: Any) -> None:
        try:
            done(*result)
        except Exception:
            _log.exception("disk cache %s: an error in the answer to a completed movement", self.url)
        finally:
            with self._idle:
                self._in_flight -= 1
                if self._closing:
                    self._idle.notify_all()


def _sum(one: int | None, more: int | None) -> int | None:
    return None if one is None or more is None else one + more
