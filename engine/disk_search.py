"""Waiting requests whose prompts the disk may know better than the index does, since others write there too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cache.disk.index import DiskIndex
from ..cache.disk.names import Stored
from ..cache.disk.probe import Probe, Prober
from ..cache.page_keys import PageKey
from ..cache.policies.policy import Use
from ..cache.rates import LoadOrRecompute
from .request import Request


@dataclass(slots=True, eq=False)
class Found:
    """What a search has brought to light."""

    names: Sequence[PageKey]
    """Of all pages of the prompt down to the last that is stored."""
    before: int
    """How many of them were known before."""
    asked_at: float


@dataclass(slots=True, eq=False)
class _Search:
    probe: Probe
    names: Sequence[PageKey]
    known: int
    asked_at: float
    deadline: float


class DiskSearch:
    """At most one search for each request; what is found enters the index."""

    def __init__(
        self, prober: Prober, index: DiskIndex, choice: LoadOrRecompute, use: Callable[[], Use]
    ) -> None:
        """`use`: the next moment."""
        self.prober = prober
        self._index = index
        self._choice = choice
        self._use = use
        self._searches: dict[Request, _Search] = {}

    def start(
        self,
        request: Request,
        names: Sequence[PageKey],
        known: int,
        tokens: int,
        *,
        patience: float,
        now: float,
    ) -> None:
        """Looks for the pages of a prompt beyond the `known` first ones, `tokens` in all, unless computing them is faster
        than asking. The request waits for the answer at most `patience` seconds."""
        if known >= len(names) or patience <= 0:
            return
        if not self._choice.worth_asking(self.prober.seconds, tokens, now):
            return
        if (probe := self.prober.ask(names[known:])) is not None:
            self._searches[request] = _Search(probe, names, known, now, now + patience)

    def answered(self) -> list[Request]:
        """The requests about which the disk has answered; `take` each."""
        return [request for request, search in self._searches.items() if search.probe.found is not None]

    def pending(self, request: Request, now: float) -> bool:
        """Whether the request has to wait for an answer still."""
        search = self._searches.get(request)
        if search is None or search.probe.found is not None:
            return False
        if now < search.deadline:
            return True
        self.prober.give_up(search.probe)
        del self._searches[request]
        return False

    def take(self, request: Request) -> Found | None:
        """What was found, once; None if that is nothing."""
        search = self._searches.get(request)
        if search is None or search.probe.found is None:
            return None
        del self._searches[request]
        names = search.names[: search.known + search.probe.found]
        if search.probe.found:
            unknown = [Stored(name, self.prober.record_bytes) for name in names if name not in self._index]
            self._index.add_listed(unknown, use=self._use(), spare_orphans=True)
        found = self._index.match(names[search.known :])
        return Found(names[: search.known + found], search.known, search.asked_at) if found else None

    def end(self, request: Request) -> None:
        """Nobody wants to know any more."""
        self._searches.pop(request, None)

    def reset(self) -> None:
        self._searches.clear()
