"""What a mover has been asked for, what is under way, and what has ended: shared by the engine's and the copy threads."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from .copy_order import CopyOrder, Job, Ticket
from .mover_parts import Gathering, Lane, Result, Staged
from .moves import Move, Outcome
from .page_keys import PageKey

logger = logging.getLogger(__name__)


class CopyBooks:
    """Everything here, methods included, is for who holds `changed`.

    wake: called when there is a result again, after there was none.
    """

    def __init__(
        self,
        rows: int,
        *,
        read_bytes: int,
        write_bytes: int,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.changed = threading.Condition()
        """Notified when the copy threads may have something to do, or have done something."""
        self.tickets: dict[Move, Ticket] = {}
        self.pending: Counter[str] = Counter()
        """Pages without a result, by kind, loads left out."""
        self.filled = bytearray(rows)
        """Whether a row holds what it was last given. Only then may it be copied from."""
        self.filler: dict[int, Job] = {}
        """The last save or read that was asked to fill a row, until it ends."""
        self.gathers: deque[Job] = deque()
        """Saves that the device has yet to come to."""
        self.saves: deque[Job] = deque()
        self.loads: deque[Job] = deque()
        self.packs: deque[Job] = deque()
        """Writes and deletes that are next for their row and key."""
        self.staged: deque[Staged] = deque()
        self.reads, self.writes = Lane(read_bytes), Lane(write_bytes)
        self.results: list[Result] = []
        self.undeleted: list[PageKey] = []
        self.saving: Job | None = None
        """The save that is being copied."""
        self.closing = self.stopped = False
        self._order = CopyOrder()
        self._clock, self._wake = clock, wake

    def open(self, move: Move) -> Ticket:
        """Takes a movement in; once `closing`, one that is cancelled."""
        ticket = Ticket(move)
        self.tickets[move] = ticket
        if move.kind != "load":
            self.pending[move.kind] += move.pages
        ticket.cancelled = self.closing
        if self.closing or not move.pages:
            self.post(ticket, 0, [Outcome.CANCELLED] * move.pages)
        return ticket

    def add(self, job: Job) -> None:
        """Takes in a job, which runs when those before it for its rows and key have ended."""
        self._order.add(job)
        if job.kind in ("save", "read"):
            for row in job.rows:
                self.filler[row] = job
        if job.waits == 0:
            self._enqueue(job)

    def arrive(self, job: Job) -> None:
        """One thing that the job waited for is there."""
        job.waits -= 1
        if job.waits == 0:
            self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        match job.kind:
            case "save":
                self.saves.append(job)
            case "load":
                self.loads.append(job)
            case "read" if job.ticket is not None and job.ticket.cancelled:
                self._end_read_unasked(job)
            case "read":
                self.reads.waiting.append((job, job.size))
            case _:
                self.packs.append(job)
        self.changed.notify_all()

    def fill(self, job: Job, *, good: bool) -> None:
        """Ends a save or a read, and says whether its rows now hold what they should."""
        for row in job.rows:
            self.filled[row] = good
            if self.filler.get(row) is job:
                del self.filler[row]
        self.end(job)

    def end(self, job: Job) -> None:
        """The job needs its rows and its key no longer."""
        for follower in self._order.end(job):
            self._enqueue(follower)

    def post(
        self,
        ticket: Ticket,
        first: int,
        outcomes: Sequence[Outcome],
        seconds: float | None = None,
        rows: Sequence[int] = (),
    ) -> None:
        """Leaves a result for `poll`."""
        if ticket.move.kind != "load":
            self.pending[ticket.move.kind] -= len(outcomes)
        self.results.append(Result(ticket, first, outcomes, seconds, self._clock(), rows))
        if len(self.results) == 1:
            self._wake()

    def notice_gathers(self) -> None:
        # The device runs them in order.
        while self.gathers and _is_ready(self.gathers[0].source):
            self.arrive(self.gathers.popleft())

    def cancel_load(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        self.post(ticket, 0, [Outcome.CANCELLED] * ticket.move.pages)

    def cancel_reads(self, tickets: set[Ticket]) -> None:
        """What was not asked of the store yet never will be."""
        for ticket in tickets:
            ticket.cancelled = True
        waiting = self.reads.waiting
        for job, size in [waiting.popleft() for _ in range(len(waiting))]:
            if job.ticket in tickets:
                self._end_read_unasked(job)
            else:
                waiting.append((job, size))

    def _end_read_unasked(self, job: Job) -> None:
        assert job.ticket is not None
        self.fill(job, good=False)
        self.post(job.ticket, job.first, [Outcome.CANCELLED])

    def drained(self) -> bool:
        """Whether all that must not be lost has ended."""
        return not any(self.pending[kind] for kind in ("save", "write", "delete"))


def _is_ready(gathering: Gathering) -> bool:
    try:
        return gathering.is_ready()
    except Exception:
        # What is wrong shows when its rows are asked for.
        return True
