"""Copies pages between device, host and disk. Knows no jax and no file: it is handed a device pool and a store.

    engine's thread    save: starts a gather          poll: scatters what is staged, tells of what has ended
    copy thread        gathered pages -> rows         rows -> staging      rows -> records      records -> rows
    store's threads                                                        writes, reads

Only the copy thread touches the rows. What must run in order is `CopyOrder`'s business.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from .copy_order import CopyOrder, Job, Ticket
from .disk.record import PageLayout, RecordError, pack, unpack
from .host_pool import HostPool
from .mover_parts import Device, Gathering, Lane, Result, Staged, Store
from .mover_stats import MoverStats
from .moves import Move, Outcome
from .page_keys import PageKey

logger = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 256 << 20
NAP_S = 0.005
"""How often the copy thread looks whether the device has come to a gather or a scatter, when no `poll` tells it."""

T = TypeVar("T")


class TierMover:
    """Implements `moves.Mover`. `save` waits only while more is under way than the device pool has buffers for.

    wake: called in any thread when `poll` has something to do again; it must be quick and not call the mover.
    """

    def __init__(
        self,
        device: Device,
        host: HostPool,
        *,
        clock: Callable[[], float],
        store: Store | None = None,
        layout: PageLayout | None = None,
        read_bytes: int = IN_FLIGHT_BYTES,
        write_bytes: int = IN_FLIGHT_BYTES,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`layout` is needed with a store. Raises ValueError when the page sizes of the tiers differ."""
        sizes = {"device": device.page_bytes, "host": host.page_bytes}
        if store is not None:
            if layout is None:
                raise ValueError("a store of pages needs their layout")
            sizes["disk"] = layout.nbytes
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the bytes of a page differ between the tiers: {sizes}")
        self.stats = MoverStats()
        self._device, self._host, self._store, self._layout = device, host, store, layout
        self._clock, self._wake = clock, wake
        self._page_bytes = host.page_bytes

        self._changed = threading.Condition()
        """Guards everything below; notified when the copy thread may have something to do, or has done something."""
        self._order = CopyOrder()
        self._tickets: dict[Move, Ticket] = {}
        self._pending: Counter[str] = Counter()
        """Pages without a result, by kind, loads left out."""
        self._filled = bytearray(host.num_rows)
        """Whether a row holds what it was last given. Only then may it be copied from."""
        self._filler: dict[int, Job] = {}
        """The last save or read that was asked to fill a row, until it ends."""
        self._gathers: deque[Job] = deque()
        self._ready: deque[Job] = deque()
        """Saves whose pages, and reads whose records, are there."""
        self._loads: deque[Job] = deque()
        self._packs: deque[Job] = deque()
        """Writes and deletes that are next for their row and key."""
        self._staged: deque[Staged] = deque()
        self._reads, self._writes = Lane(read_bytes), Lane(write_bytes)
        self._results: list[Result] = []
        self._undeleted: list[PageKey] = []
        self._running: Job | None = None
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tierax-copies", daemon=True)
        self._thread.start()

    # What the engine's thread calls.

    def save(self, device_pages: Sequence[int], host_rows: Sequence[int]) -> Move:
        ticket = self._open("save", device_pages, host_rows)
        if not ticket.cancelled:
            for first, pages in self._batches(device_pages):
                rows = host_rows[first : first + len(pages)]
                job = Job("save", rows, ticket, first, began=self._clock(), waits=1)
                try:
                    job.source = self._gather(pages)
                except Exception:
                    logger.exception("pages could not be read from the device")
                    job.outcome = Outcome.IO_ERROR
                with self._changed:
                    self._add(job)
                    if job.source is None:
                        self._arrive(job)
                    else:
                        self._gathers.append(job)
                        self._changed.notify_all()
        return ticket.move

    def load(self, host_rows: Sequence[int], device_pages: Sequence[int]) -> Move:
        ticket = self._open("load", host_rows, device_pages)
        if not ticket.cancelled:
            with self._changed:
                for first, rows in self._batches(host_rows):
                    pages = device_pages[first : first + len(rows)]
                    self._add(Job("load", rows, ticket, first, pages=pages))
        return ticket.move

    def read(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        ticket = self._open("read", keys, host_rows)
        if not ticket.cancelled:
            _, layout = self._disk()
            with self._changed:
                for i, (key, row) in enumerate(zip(keys, host_rows, strict=True)):
                    job = Job("read", (row,), ticket, i, key=key, waits=1)
                    self._add(job)
                    self._reads.waiting.append((job, layout.record_bytes))
            # Asked from here, all at once: the copy thread would do it between copies. What exceeds the bound waits for it.
            while (job := self._next_read()) is not None:
                self._ask(job)
        return ticket.move

    def write(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        ticket = self._open("write", keys, host_rows)
        if not ticket.cancelled:
            self._disk()
            with self._changed:
                for i, (key, row) in enumerate(zip(keys, host_rows, strict=True)):
                    self._add(Job("write", (row,), ticket, i, key=key))
        return ticket.move

    def delete(self, keys: Sequence[PageKey]) -> None:
        with self._changed:
            if not self._closing:
                for key in keys:
                    self._pending["delete"] += 1
                    self._add(Job("delete", (), key=key))

    def take_undeleted(self) -> list[PageKey]:
        with self._changed:
            undeleted, self._undeleted = self._undeleted, []
        return undeleted

    def poll(self, now: float) -> list[Move]:
        self._scatter_staged()
        with self._changed:
            self._notice_gathers()
            if self._loads:
                # A staging buffer may be free again.
                self._changed.notify_all()
            results, self._results = self._results, []
        news: dict[Move, None] = {}
        for result in results:
            if self._tell(result):
                news[result.ticket.move] = None
        return list(news)

    def cancel(self, move: Move) -> None:
        """As promised for loads. Of a read, what was not asked of the store yet is cancelled; the rest goes on."""
        with self._changed:
            ticket = self._tickets.get(move)
            if ticket is None or ticket.cancelled:
                return
            if move.kind == "load":
                self._cancel_load(ticket)
            elif move.kind == "read":
                self._cancel_reads({ticket})

    def reset(self) -> set[int]:
        with self._changed:
            self._changed.wait_for(lambda: self._running is None or self._running.kind != "save")
            unfilled = {
                row
                for result in self._results
                if result.ticket.move.kind == "save"
                for row in result.rows
                if row not in self._filler and not self._filled[row]
            }
            for ticket in self._tickets.values():
                if ticket.move.kind == "load" and not ticket.cancelled:
                    self._cancel_load(ticket)
                elif ticket.move.kind == "save":
                    ticket.cancelled = True
            unfilled.update(row for row, job in self._filler.items() if job.kind == "save")
            while self._gathers:
                self._arrive(self._gathers.popleft())
        return unfilled

    def close(self, timeout: float = 10.0) -> bool:
        """Drops loads and reads, lets saves and writes end within `timeout` seconds, and ends the thread.

        Returns False if some did not end. Whatever is asked for afterwards is cancelled.
        """
        with self._changed:
            if not self._closing:
                self._closing = True
                reading = {ticket for ticket in self._tickets.values() if ticket.move.kind == "read"}
                self._cancel_reads(reading)
                for ticket in self._tickets.values():
                    if ticket.move.kind == "load" and not ticket.cancelled:
                        self._cancel_load(ticket)
                self._changed.notify_all()
            # The clock that matters here is the operating system's: somebody waits for the process to end.
            drained = self._changed.wait_for(self._drained, timeout)
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(max(timeout, 1.0))
        return drained and not self._thread.is_alive()

    @property
    def write_backlog_bytes(self) -> int:
        """Bytes of pages to be written that have no outcome yet."""
        return self._pending["write"] * self._page_bytes

    @property
    def read_backlog_bytes(self) -> int:
        """Bytes of pages to be read that have no outcome yet."""
        return self._pending["read"] * self._page_bytes

    def bytes_held(self) -> int:
        """Bytes of memory for pages on their way, the host pool left out: staging, and records read and to be written."""
        with self._changed:
            waiting = sum(size for _, size in self._writes.waiting)
            return self._device.bytes_held + self._reads.in_flight + self._writes.in_flight + waiting

    def _open(self, kind: str, sources: Sequence[Any], targets: Sequence[Any]) -> Ticket:
        if len(sources) != len(targets):
            raise ValueError(f"{kind}: {len(sources)} sources for {len(targets)} targets")
        move = Move(kind, len(sources), self._page_bytes)
        ticket = Ticket(move)
        with self._changed:
            self._tickets[move] = ticket
            if kind != "load":
                self._pending[kind] += move.pages
            ticket.cancelled = self._closing
            if self._closing or not sources:
                self._post(ticket, 0, [Outcome.CANCELLED] * move.pages)
        return ticket

    def _batches(self, items: Sequence[T]) -> Iterator[tuple[int, Sequence[T]]]:
        size = self._device.batch_pages
        return ((first, items[first : first + size]) for first in range(0, len(items), size))

    def _gather(self, pages: Sequence[int]) -> Gathering:
        while (gathering := self._device.gather(pages)) is None:
            # Buffers come back once the copy thread has saved their pages, which may have to wait for a load.
            self._scatter_staged()
            with self._changed:
                self._notice_gathers()
                self._changed.wait(NAP_S)
        return gathering

    def _scatter_staged(self) -> None:
        while True:
            with self._changed:
                if not self._staged:
                    return
                job, staging, good, seconds = self._staged.popleft()
            assert job.ticket is not None
            if job.ticket.cancelled:
                self._device.give_back(staging)
                continue
            began = self._clock()
            outcome = Outcome.OK
            try:
                self._device.scatter(staging, [job.pages[i] for i in good])
            except Exception:
                logger.exception("pages could not be written to the device")
                outcome = Outcome.IO_ERROR
            # Pages that were no good have been told of.
            seconds += self._clock() - began
            with self._changed:
                for i in good[1:]:
                    self._post(job.ticket, job.first + i, [outcome])
                self._post(job.ticket, job.first + good[0], [outcome], seconds)

    def _tell(self, result: Result) -> bool:
        """Enters a result into its move. False if it says nothing new."""
        ticket, move = result.ticket, result.ticket.move
        stats = self.stats.kinds[move.kind]
        fresh = not move.outcomes
        for i, outcome in enumerate(result.outcomes, result.first):
            if move.outcomes[i] is None:
                fresh = True
                move.outcomes[i] = outcome
                if outcome is Outcome.OK:
                    stats.pages += 1
                    stats.bytes += move.page_bytes
                else:
                    stats.failures[outcome] += 1
        if fresh and result.seconds is not None:
            stats.observe(result.seconds)
            if ticket.began is None:
                move.seconds += result.seconds
            else:
                move.seconds = max(move.seconds, result.ended - ticket.began)
        if fresh and move.done:
            stats.moves += 1
            stats.seconds += move.seconds
            with self._changed:
                self._tickets.pop(move, None)
        return fresh

    # With the lock held, in any thread.

    def _add(self, job: Job) -> None:
        self._order.add(job)
        if job.kind in ("save", "read"):
            for row in job.rows:
                self._filler[row] = job
        if job.waits == 0:
            self._enqueue(job)

    def _arrive(self, job: Job) -> None:
        """What the job copies is there."""
        job.waits -= 1
        if job.waits == 0:
            self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        match job.kind:
            case "load":
                self._loads.append(job)
            case "write" | "delete":
                self._packs.append(job)
            case _:
                self._ready.append(job)
        self._changed.notify_all()

    def _end(self, job: Job) -> None:
        for row in job.rows:
            if self._filler.get(row) is job:
                del self._filler[row]
        for follower in self._order.end(job):
            self._enqueue(follower)

    def _post(
        self,
        ticket: Ticket,
        first: int,
        outcomes: Sequence[Outcome],
        seconds: float | None = None,
        rows: Sequence[int] = (),
    ) -> None:
        if ticket.move.kind != "load":
            self._pending[ticket.move.kind] -= len(outcomes)
        self._results.append(Result(ticket, first, outcomes, seconds, self._clock(), rows))
        if len(self._results) == 1:
            self._wake()

    def _notice_gathers(self) -> None:
        # The device runs them in order.
        while self._gathers and _is_ready(self._gathers[0].source):
            self._arrive(self._gathers.popleft())

    def _cancel_load(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        self._post(ticket, 0, [Outcome.CANCELLED] * ticket.move.pages)

    def _cancel_reads(self, tickets: set[Ticket]) -> None:
        waiting = self._reads.waiting
        for job, size in [waiting.popleft() for _ in range(len(waiting))]:
            if job.ticket in tickets:
                job.outcome = Outcome.CANCELLED
                self._arrive(job)
            else:
                waiting.append((job, size))

    def _drained(self) -> bool:
        return not any(self._pending[kind] for kind in ("save", "write", "delete"))

    # The copy thread.

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """The next thing to do, waited for; what lets others work comes first. None at the end."""
        with self._changed:
            while not self._stopped:
                self._notice_gathers()
                if job := self._reads.next():
                    return partial(self._ask, job)
                if job := self._writes.next():
                    return partial(self._hand_over, job)
                if self._loads and (staging := self._take_staging()) is not None:
                    return partial(self._load, self._loads.popleft(), staging)
                if self._ready:
                    job = self._running = self._ready.popleft()
                    return partial(self._save if job.kind == "save" else self._fill, job)
                if self._packs:
                    return partial(self._pack, self._packs.popleft())
                self._changed.wait(NAP_S if self._gathers or self._loads else None)
        return None

    def _take_staging(self) -> Any:
        try:
            return self._device.take_staging()
        except Exception:
            logger.exception("no staging buffer")
            return None

    def _save(self, job: Job) -> None:
        ticket, began = job.ticket, self._clock()
        assert ticket is not None
        outcome = Outcome.CANCELLED if ticket.cancelled else job.outcome
        try:
            if outcome is Outcome.OK:
                self._host.put(job.source.rows(), job.rows)
                job.source.release()
            elif job.source is not None:
                job.source.abandon()
        except Exception:
            logger.exception("pages from the device were lost")
            outcome = Outcome.IO_ERROR
        job.source = None
        good = outcome is Outcome.OK
        with self._changed:
            for row in job.rows:
                self._filled[row] = good
            self._end(job)
            seconds = self._clock() - began if good else None
            self._post(ticket, job.first, [outcome] * len(job.rows), seconds, job.rows)

    def _load(self, job: Job, staging: Any) -> None:
        ticket, began = job.ticket, self._clock()
        assert ticket is not None
        good = [] if ticket.cancelled else [i for i, row in enumerate(job.rows) if self._filled[row]]
        uploaded = False
        try:
            if good:
                self._host.get([job.rows[i] for i in good], staging.rows)
                self._device.upload(staging, len(good))
                uploaded = True
        except Exception:
            logger.exception("pages could not be staged for the device")
            good = []
        with self._changed:
            self._end(job)
            if uploaded:
                self._staged.append(Staged(job, staging, good, self._clock() - began))
                if len(self._staged) == 1:
                    self._wake()
            else:
                self._device.give_back(staging)
            if not ticket.cancelled:
                for i in set(range(len(job.rows))).difference(good):
                    self._post(ticket, job.first + i, [Outcome.IO_ERROR])
            self._changed.notify_all()

    def _next_read(self) -> Job | None:
        with self._changed:
            return self._reads.next()

    def _ask(self, job: Job) -> None:
        """Asks the store for a record."""
        ticket, key = job.ticket, job.key
        assert ticket is not None
        assert key is not None
        job.began = self._clock()
        job.issued = True
        if ticket.began is None:
            ticket.began = job.began
        try:
            self._disk()[0].read(key, partial(self._read_done, job))
        except Exception:
            logger.exception("the store raised in a read")
            self._read_done(job, Outcome.IO_ERROR, None)

    def _read_done(self, job: Job, outcome: Outcome, record: Callable[[], bytes] | None) -> None:
        with self._changed:
            job.outcome, job.source = outcome, record
            self._arrive(job)

    def _fill(self, job: Job) -> None:
        """Verifies a record that was read, and copies its page into its row."""
        ticket, key, outcome = job.ticket, job.key, job.outcome
        assert ticket is not None
        assert key is not None
        layout = self._disk()[1]
        try:
            if outcome is Outcome.OK:
                page = np.frombuffer(unpack(job.source(), key, layout), np.uint8)
                self._host.put(page.reshape(1, -1), job.rows)
        except RecordError as error:
            logger.warning("page %s of the disk cache is not used: %s", key.key.hex(), error)
            outcome = Outcome.CORRUPT
        except Exception:
            logger.exception("a record could not be read")
            outcome = Outcome.IO_ERROR
        job.source = None
        good = outcome is Outcome.OK
        with self._changed:
            if job.issued:
                self._reads.in_flight -= layout.record_bytes
            self._filled[job.rows[0]] = good
            self._end(job)
            self._post(ticket, job.first, [outcome], self._clock() - job.began if good else None)

    def _pack(self, job: Job) -> None:
        """Makes a record of a page, after which its row is no longer needed."""
        key, size, outcome = job.key, 0, Outcome.OK
        assert key is not None
        if job.kind == "write":
            row = job.rows[0]
            try:
                if self._filled[row]:
                    job.source = pack(key, self._disk()[1], self._host.slab[row])
                    size = len(job.source)
                else:
                    outcome = Outcome.IO_ERROR
            except Exception:
                logger.exception("a record could not be made")
                outcome = Outcome.IO_ERROR
        with self._changed:
            self._end(job)
            if outcome is Outcome.OK:
                self._writes.waiting.append((job, size))
            elif job.ticket is not None:
                self._post(job.ticket, job.first, [outcome])

    def _hand_over(self, job: Job) -> None:
        """Hands a record, or the wish to delete one, to the store."""
        key, record = job.key, job.source
        assert key is not None
        # The store keeps it as long as it needs it.
        job.source = None
        job.began = self._clock()
        size = 0 if record is None else len(record)
        done = partial(self._write_done, job, size)
        store = self._disk()[0]
        try:
            if record is None:
                store.delete(key, done)
            else:
                assert job.ticket is not None
                if job.ticket.began is None:
                    job.ticket.began = job.began
                store.write(key, record, done)
        except Exception:
            logger.exception("the store raised in a %s", job.kind)
            done(Outcome.IO_ERROR)

    def _write_done(self, job: Job, size: int, outcome: Outcome) -> None:
        with self._changed:
            self._writes.in_flight -= size
            if job.ticket is None:
                self._pending["delete"] -= 1
                if outcome not in (Outcome.OK, Outcome.MISSING, Outcome.CANCELLED):
                    assert job.key is not None
                    self._undeleted.append(job.key)
            else:
                seconds = self._clock() - job.began if outcome is Outcome.OK else None
                self._post(job.ticket, job.first, [outcome], seconds)
            self._changed.notify_all()

    def _disk(self) -> tuple[Store, PageLayout]:
        assert self._store is not None, "there is no disk tier"
        assert self._layout is not None
        return self._store, self._layout


def _is_ready(gathering: Gathering) -> bool:
    try:
        return gathering.is_ready()
    except Exception:
        # What is wrong shows when its rows are asked for.
        return True
