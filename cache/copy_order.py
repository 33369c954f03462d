"""Which copies may run: those that share a host row or a key run in the order they were asked for, others in any."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .moves import Move, Outcome
from .page_keys import PageKey

Kind = Literal["save", "load", "read", "write", "delete"]


@dataclass(slots=True, eq=False)
class Ticket:
    """A movement under way."""

    move: Move
    cancelled: bool = False
    began: float | None = None
    """When its first page was asked of the store."""


@dataclass(slots=True, eq=False)
class Job:
    """One copy: some pages of a movement that are copied together."""

    kind: Kind
    rows: Sequence[int]
    ticket: Ticket | None = None
    """None for a delete."""
    first: int = 0
    """Which page of the movement is its first."""
    key: PageKey | None = None
    pages: Sequence[int] = ()
    """On the device, for a load."""
    source: Any = None
    """What it copies, once that is there: a gather's handle, a staging buffer, a record."""
    outcome: Outcome = Outcome.OK
    """Of the source."""
    began: float = 0.0
    size: int = 0
    """Bytes that it has under way in the store, for a read."""
    waits: int = 0
    """Jobs and events that must come first."""
    followers: list[Job] = field(default_factory=list)

    @property
    def resources(self) -> Iterable[Hashable]:
        yield from self.rows
        # A read needs no order by key: the store shows only what is whole.
        if self.key is not None and self.kind != "read":
            yield self.key


class CopyOrder:
    """Knows the last job for every row and key that has any. Not thread safe."""

    def __init__(self) -> None:
        self._last: dict[Hashable, Job] = {}

    def add(self, job: Job) -> None:
        """Makes `job` wait for the jobs before it."""
        for resource in job.resources:
            before = self._last.get(resource)
            if before is not None and before is not job:
                before.followers.append(job)
                job.waits += 1
            self._last[resource] = job

    def end(self, job: Job) -> list[Job]:
        """Takes out a job that ran; returns those that have nothing more to wait for."""
        for resource in job.resources:
            if self._last.get(resource) is job:
                del self._last[resource]
        free = []
        for follower in job.followers:
            follower.waits -= 1
            if follower.waits == 0:
                free.append(follower)
        return free
