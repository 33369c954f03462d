"""Copies pages between device, host and disk. Knows no jax and no file: it is handed a device pool and a way to records.

    engine's thread    save: starts a gather          poll: scatters what is staged, tells of what has ended
    copy threads       gathered pages -> rows         rows -> staging      rows -> records
    store's threads                                                        writes        reads into rows

What must run in order for the sake of a row or a key is `CopyOrder`'s business; `CopyBooks` is what the threads share.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .copy_books import CopyBooks
from .copy_order import Job, Ticket
from .copy_threads import NAP_S, CopyThreads
from .host_pool import HostPool
from .mover_parts import Device, Gathering, Records, Result
from .mover_stats import MoverStats
from .moves import Move, Outcome
from .page_keys import PageKey

logger = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 256 << 20

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
        records: Records | None = None,
        read_bytes: int = IN_FLIGHT_BYTES,
        write_bytes: int = IN_FLIGHT_BYTES,
        wake: Callable[[], None] = lambda: None,
        ordered: Callable[[str, Sequence[Any], Sequence[int]], None] = lambda kind, sources, targets: None,
    ) -> None:
        """`records`: None without a disk. `ordered` is told of every save and load, batch by batch, when the device has been told
        of it, and of every write. Raises ValueError when the page sizes of the tiers differ."""
        sizes = {"device": device.page_bytes, "host": host.page_bytes}
        if records is not None:
            sizes["disk"] = records.row_bytes
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the bytes of a page differ between the tiers: {sizes}")
        self.stats = MoverStats()
        self._device = device
        self._ordered = ordered
        self._record_bytes = 0 if records is None else records.record_bytes
        self._clock = clock
        self._page_bytes = host.page_bytes
        self._books = CopyBooks(
            host.num_rows, read_bytes=read_bytes, write_bytes=write_bytes, clock=clock, wake=wake
        )
        self._changed = self._books.changed
        self._ended = {"read": 0.0, "write": 0.0}
        """When the disk last ended something, by kind."""
        self._copies = CopyThreads(self._books, device, host, records, clock=clock, wake=wake)

    def save(self, device_pages: Sequence[int], host_rows: Sequence[int]) -> Move:
        ticket = self._open("save", device_pages, host_rows)
        if not ticket.cancelled:
            for first, pages in self._batches(device_pages):
                rows = host_rows[first : first + len(pages)]
                job = Job("save", rows, ticket, first, began=self._clock(), waits=1)
                try:
                    job.source = self._gather(pages)
                    self._ordered("save", pages, rows)
                except Exception:
                    logger.exception("pages could not be read from the device")
                    job.outcome = Outcome.IO_ERROR
                with self._changed:
                    self._books.add(job)
                    if job.source is None:
                        self._books.arrive(job)
                    else:
                        self._books.gathers.append(job)
                        self._changed.notify_all()
        return ticket.move

    def load(self, host_rows: Sequence[int], device_pages: Sequence[int]) -> Move:
        ticket = self._open("load", host_rows, device_pages)
        if not ticket.cancelled:
            with self._changed:
                for first, rows in self._batches(host_rows):
                    pages = device_pages[first : first + len(rows)]
                    self._books.add(Job("load", rows, ticket, first, pages=pages))
        return ticket.move

    def read(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        ticket = self._open("read", keys, host_rows)
        if not ticket.cancelled:
            with self._changed:
                for i, (key, row) in enumerate(zip(keys, host_rows, strict=True)):
                    self._books.add(Job("read", (row,), ticket, i, key=key, size=self._record_bytes))
            # Asked from here, all at once: the copy threads would do it between copies. What exceeds the bound waits for it.
            while (job := self._next_read()) is not None:
                self._copies.ask(job)
        return ticket.move

    def _next_read(self) -> Job | None:
        with self._changed:
            return self._books.reads.next()

    def write(self, keys: Sequence[PageKey], host_rows: Sequence[int]) -> Move:
        ticket = self._open("write", keys, host_rows)
        if not ticket.cancelled:
            self._ordered("write", keys, host_rows)
            with self._changed:
                for i, (key, row) in enumerate(zip(keys, host_rows, strict=True)):
                    self._books.add(Job("write", (row,), ticket, i, key=key))
        return ticket.move

    def delete(self, keys: Sequence[PageKey]) -> None:
        with self._changed:
            if not self._books.closing:
                for key in keys:
                    self._books.pending["delete"] += 1
                    self._books.add(Job("delete", (), key=key))

    def take_undeleted(self) -> list[PageKey]:
        with self._changed:
            undeleted, self._books.undeleted = self._books.undeleted, []
        return undeleted

    def poll(self, now: float) -> list[Move]:
        self._scatter_staged()
        with self._changed:
            self._books.notice_gathers()
            if self._books.loads:
                # A staging buffer may be free again.
                self._changed.notify_all()
            results, self._books.results = self._books.results, []
        news: dict[Move, None] = {}
        for result in results:
            if self._tell(result):
                news[result.ticket.move] = None
        return list(news)

    def cancel(self, move: Move) -> None:
        """As promised for loads. Of a read, what was not asked of the store yet is cancelled; the rest goes on."""
        with self._changed:
            ticket = self._books.tickets.get(move)
            if ticket is None or ticket.cancelled:
                return
            if move.kind == "load":
                self._books.cancel_load(ticket)
            elif move.kind == "read":
                self._books.cancel_reads({ticket})

    def reset(self) -> set[int]:
        with self._changed:
            self._changed.wait_for(lambda: self._books.saving is None)
            unfilled = {
                row
                for result in self._books.results
                if result.ticket.move.kind == "save"
                for row in result.rows
                if row not in self._books.filler and not self._books.filled[row]
            }
            for ticket in self._books.tickets.values():
                if ticket.move.kind == "load" and not ticket.cancelled:
                    self._books.cancel_load(ticket)
                elif ticket.move.kind == "save":
                    ticket.cancelled = True
            unfilled.update(row for row, job in self._books.filler.items() if job.kind == "save")
            while self._books.gathers:
                self._books.arrive(self._books.gathers.popleft())
        return unfilled

    def close(self, timeout: float = 10.0) -> bool:
        """Drops loads and reads, lets saves and writes end within `timeout` seconds, and ends the threads.

        Returns False if some did not end. Whatever is asked for afterwards is cancelled.
        """
        with self._changed:
            if not self._books.closing:
                self._books.closing = True
                reading = {ticket for ticket in self._books.tickets.values() if ticket.move.kind == "read"}
                self._books.cancel_reads(reading)
                for ticket in self._books.tickets.values():
                    if ticket.move.kind == "load" and not ticket.cancelled:
                        self._books.cancel_load(ticket)
                self._changed.notify_all()
            # The clock that matters here is the operating system's: somebody waits for the process to end.
            drained = self._changed.wait_for(self._books.drained, timeout)
            self._books.stopped = True
            self._changed.notify_all()
        return self._copies.join(max(timeout, 1.0)) and drained

    @property
    def write_backlog_bytes(self) -> int:
        """Bytes of pages to be written that have no outcome yet."""
        return self._books.pending["write"] * self._page_bytes

    @property
    def read_backlog_bytes(self) -> int:
        """Bytes of pages to be read that have no outcome yet."""
        return self._books.pending["read"] * self._page_bytes

    def in_flight(self) -> Counter[str]:
        """Pages that have no outcome yet, by kind; a glance that waits for nobody."""
        found: Counter[str] = Counter()
        for move in list(self._books.tickets):
            found[move.kind] += move.outcomes.count(None)
        return found

    def bytes_held(self) -> int:
        """Bytes of memory for pages on their way, the host pool left out: staging, and records read and to be written."""
        with self._changed:
            waiting = sum(size for _, size in self._books.writes.waiting)
            return (
                self._device.bytes_held + self._books.reads.in_flight + self._books.writes.in_flight + waiting
            )

    def _open(self, kind: str, sources: Sequence[Any], targets: Sequence[Any]) -> Ticket:
        if len(sources) != len(targets):
            raise ValueError(f"{kind}: {len(sources)} sources for {len(targets)} targets")
        with self._changed:
            return self._books.open(Move(kind, len(sources), self._page_bytes))

    def _batches(self, items: Sequence[T]) -> Iterator[tuple[int, Sequence[T]]]:
        size = self._device.batch_pages
        return ((first, items[first : first + size]) for first in range(0, len(items), size))

    def _gather(self, pages: Sequence[int]) -> Gathering:
        while (gathering := self._device.gather(pages)) is None:
            # Buffers come back once their pages are in rows, which may have to wait for a load.
            self._scatter_staged()
            with self._changed:
                self._books.notice_gathers()
                self._changed.wait(NAP_S)
        return gathering

    def _scatter_staged(self) -> None:
        while True:
            with self._changed:
                if not self._books.staged:
                    return
                job, staging, good, seconds = self._books.staged.popleft()
            assert job.ticket is not None
            if job.ticket.cancelled:
                self._device.give_back(staging)
                continue
            began = self._clock()
            outcome = Outcome.OK
            try:
                pages = [job.pages[i] for i in good]
                self._device.scatter(staging, pages)
                self._ordered("load", [job.rows[i] for i in good], pages)
            except Exception:
                logger.exception("pages could not be written to the device")
                outcome = Outcome.IO_ERROR
            # Pages that were no good have been told of.
            seconds += self._clock() - began
            with self._changed:
                for i in good[1:]:
                    self._books.post(job.ticket, job.first + i, [outcome])
                self._books.post(job.ticket, job.first + good[0], [outcome], seconds)

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
                # While several share the disk, each has the time since whatever ended before.
                since = max(ticket.began, self._ended[move.kind])
                move.seconds += max(result.ended - since, 0.0)
                self._ended[move.kind] = max(result.ended, self._ended[move.kind])
        if fresh and move.done:
            stats.moves += 1
            stats.seconds += move.seconds
            with self._changed:
                self._books.tickets.pop(move, None)
        return fresh
