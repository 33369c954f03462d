"""The threads that copy: rows into staging buffers, gathered pages into rows and those into records.

One for each direction: what goes up is waited for; what goes down takes the processor time that is left.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

from .background import step_back
from .copy_books import CopyBooks
from .copy_order import Job
from .host_pool import HostPool
from .mover_parts import Device, Records, Staged
from .moves import Outcome

logger = logging.getLogger(__name__)

NAP_S = 0.005
"""How often a thread looks whether the device has come to a gather or a scatter, when no `poll` tells it."""


class CopyThreads:
    """Work off what the books say until they are `stopped`. `ask` may be called in any thread; the rest is their own."""

    def __init__(
        self,
        books: CopyBooks,
        device: Device,
        host: HostPool,
        records: Records | None,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._books, self._device, self._host = books, device, host
        self._records = records
        self._clock, self._wake = clock, wake
        self._threads = [
            threading.Thread(
                target=self._run, args=(self._next_up, books.loads), name="tierax-loads", daemon=True
            ),
            threading.Thread(target=self._run_behind, name="tierax-saves", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout: float) -> bool:
        """Waits for the end of the threads; False if it has not come."""
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def ask(self, job: Job) -> None:
        """Asks for a record, whose payload goes straight into the job's row."""
        ticket, key = job.ticket, job.key
        assert ticket is not None
        assert key is not None
        job.began = self._clock()
        if ticket.began is None:
            ticket.began = job.began
        done = partial(self._read_done, job)
        row = job.rows[0]
        try:
            self._disk().read(key, row, self._host.row(row), done)
        except Exception:
            logger.exception("the store raised in a read")
            done(Outcome.IO_ERROR)

    def _read_done(self, job: Job, outcome: Outcome) -> None:
        ticket = job.ticket
        assert ticket is not None
        good = outcome is Outcome.OK
        with self._books.changed:
            self._books.reads.in_flight -= job.size
            self._books.fill(job, good=good)
            self._books.post(ticket, job.first, [outcome], self._clock() - job.began if good else None)
            if self._books.reads.waiting:
                self._books.changed.notify_all()

    def _run_behind(self) -> None:
        step_back()
        self._run(self._next_down, self._books.gathers)

    def _run(self, look: Callable[[], Callable[[], None] | None], slow: Sized) -> None:
        """`slow`: what may be held up by the device alone, which tells nobody when it is not any more."""
        books = self._books
        while (task := self._wait(look, slow)) is not None:
            task()
            del task
            with books.changed:
                books.changed.notify_all()

    def _wait(self, look: Callable[[], Callable[[], None] | None], slow: Sized) -> Callable[[], None] | None:
        """The next thing to do; None at the end."""
        books = self._books
        with books.changed:
            while not books.stopped:
                if task := look():
                    return task
                books.changed.wait(NAP_S if slow else None)
        return None

    def _next_up(self) -> Callable[[], None] | None:
        books = self._books
        if job := books.reads.next():
            return partial(self.ask, job)
        if books.loads and (staging := self._take_staging()) is not None:
            return partial(self._load, books.loads.popleft(), staging)
        return None

    def _next_down(self) -> Callable[[], None] | None:
        """What lets others work comes first."""
        books = self._books
        books.notice_gathers()
        if job := books.writes.next():
            return partial(self._hand_over, job)
        if books.saves:
            job = books.saving = books.saves.popleft()
            return partial(self._save, job)
        if books.packs:
            return partial(self._pack, books.packs.popleft())
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
        with self._books.changed:
            self._books.fill(job, good=good)
            seconds = self._clock() - began if good else None
            self._books.post(ticket, job.first, [outcome] * len(job.rows), seconds, job.rows)
            self._books.saving = None

    def _load(self, job: Job, staging: Any) -> None:
        books, ticket, began = self._books, job.ticket, self._clock()
        assert ticket is not None
        good = [] if ticket.cancelled else [i for i, row in enumerate(job.rows) if books.filled[row]]
        uploaded = False
        try:
            if good:
                self._host.get([job.rows[i] for i in good], staging.rows)
                self._device.upload(staging, len(good))
                uploaded = True
        except Exception:
            logger.exception("pages could not be staged for the device")
            good = []
        with books.changed:
            books.end(job)
            if uploaded:
                books.staged.append(Staged(job, staging, good, self._clock() - began))
                if len(books.staged) == 1:
                    self._wake()
            else:
                self._device.give_back(staging)
            if not ticket.cancelled:
                for i in set(range(len(job.rows))).difference(good):
                    books.post(ticket, job.first + i, [Outcome.IO_ERROR])
            books.changed.notify_all()

    def _pack(self, job: Job) -> None:
        """Makes a record of a page, after which its row is no longer needed."""
        books, key, size, outcome = self._books, job.key, 0, Outcome.OK
        assert key is not None
        if job.kind == "write":
            row = job.rows[0]
            try:
                if books.filled[row]:
                    job.source = self._disk().pack(key, self._host.row(row))
                    size = len(job.source)
                else:
                    outcome = Outcome.IO_ERROR
            except Exception:
                logger.exception("a record could not be made")
                outcome = Outcome.IO_ERROR
            if outcome is not Outcome.OK:
                self._disk().give_up(key)
        with books.changed:
            books.end(job)
            if outcome is Outcome.OK:
                books.writes.waiting.append((job, size))
            elif job.ticket is not None:
                books.post(job.ticket, job.first, [outcome])

    def _hand_over(self, job: Job) -> None:
        """Hands a record, or the wish to delete one, to the store."""
        key, record = job.key, job.source
        assert key is not None
        # The store keeps it as long as it needs it.
        job.source = None
        job.began = self._clock()
        size = 0 if record is None else len(record)
        done = partial(self._write_done, job, size)
        records = self._disk()
        try:
            if record is None:
                records.delete(key, done)
            else:
                assert job.ticket is not None
                if job.ticket.began is None:
                    job.ticket.began = job.began
                records.write(key, record, done)
        except Exception:
            logger.exception("the store raised in a %s", job.kind)
            done(Outcome.IO_ERROR)

    def _write_done(self, job: Job, size: int, outcome: Outcome) -> None:
        books = self._books
        with books.changed:
            books.writes.in_flight -= size
            if job.ticket is None:
                books.pending["delete"] -= 1
                if outcome not in (Outcome.OK, Outcome.MISSING, Outcome.CANCELLED):
                    assert job.key is not None
                    books.undeleted.append(job.key)
            else:
                seconds = self._clock() - job.began if outcome is Outcome.OK else None
                books.post(job.ticket, job.first, [outcome], seconds)
            books.changed.notify_all()

    def _disk(self) -> Records:
        assert self._records is not None, "there is no disk tier"
        return self._records
