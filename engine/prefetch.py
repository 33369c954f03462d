"""Brings up what lower tiers hold of a waiting request's prompt: disk to host on arrival, host to device with a lease.

A request on its way through the tiers:

    start    notes what is where; holds its host pages; reads what the disk has beyond them, all at once
    ready    its policy says when the wait for the disk is over: whatever has arrived by then is used
    load     with a lease: the host's pages are copied to device pages of the lease (loads.py)
    loaded   they are in the tree, and the request can start

Reads are single-flight: what another request is reading already is waited for, not read again; so are loads. A read
whose request has gone is still placed when it arrives.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from ..cache.disk.index import DiskIndex
from ..cache.disk.probe import Prober
from ..cache.leases import Hold
from ..cache.manager import CacheManager
from ..cache.moves import Move, Mover, Outcome
from ..cache.page_keys import PageKey
from ..cache.rates import LoadOrRecompute, Pages
from .disk_search import DiskSearch
from .loads import Loads
from .prefetch_policy import PrefetchPolicy
from .request import Request


@dataclass(slots=True)
class PrefetchStats:
    """Counters since the start; they only grow."""

    disk_queries: int = 0
    """Pages that neither device nor host had when a request came."""
    disk_hits: int = 0
    """Those of them that the disk had."""
    declined_pages: int = 0
    """Pages on the disk that were computed again since reading them was expected to take longer."""
    timed_out: int = 0
    """Requests that started before all of their prefix had arrived."""
    no_room_pages: int = 0
    """Pages on the disk for which the host had no room while their request waited."""
    failed_pages: dict[str, int] = field(default_factory=dict)
    """Pages that could not be read, by outcome."""


@dataclass(slots=True, eq=False)
class _Wait:
    """A prompt's way from the disk to the host: pages `[hold.num_pages, target)` are still to come."""

    namespace: bytes
    tokens: array[int]
    hold: Hold | None
    """None once the request has gone on without what is still being read."""
    next: int
    """The next page to ask for; those before it are on the host, being read, or arrived."""
    target: int
    deadline: float
    keys: list[PageKey]
    """Of all pages up to `target`."""
    reading: int = 0
    """Pages of its own that are being read."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Page -> host row with its contents, until its place is reached."""
    failed: set[int] = field(default_factory=set)


_TYPICAL_SHARE = 0.75
"""Of a read's pages: how fast these came is the disk's rate. A single page that stalls says nothing about it, and how long
to wait for that one is the policy's business."""


@dataclass(slots=True, eq=False)
class _Read:
    wait: _Wait
    first: int
    rows: list[int]
    open: set[int]
    """Its pages without an outcome so far; outcomes come in any order, and each is taken once."""
    arrived: int = 0
    measured: bool = False
    """Its rate has been told to `LoadOrRecompute`."""


class Prefetcher:
    """The upward half of the transfers: reads from the disk, and the `loads` that follow. `index` is None without a disk."""

    def __init__(
        self,
        cache: CacheManager,
        mover: Mover,
        index: DiskIndex | None,
        *,
        page_bytes: int,
        policy: PrefetchPolicy,
        max_wait: float,
        on_arrival: bool = True,
        prober: Prober | None = None,
    ) -> None:
        """`on_arrival`: reads begin when a request comes, else only when its turn has come. `prober`: where others write to
        the disk too, asks it for what the index does not know."""
        self.stats = PrefetchStats()
        self.choice = LoadOrRecompute()
        self._cache = cache
        self._mover = mover
        self._index = index
        self._on_arrival = on_arrival
        self._page_bytes = page_bytes
        self._policy = policy
        self._max_wait = max_wait
        self.search: DiskSearch | None = None
        if prober is not None and index is not None:
            self.search = DiskSearch(prober, index, self.choice, cache.tiers.use)
        self._late: set[Request] = set()
        """Requests that read when it is their turn."""
        self._waits: dict[Request, _Wait] = {}
        self._reads: dict[Move, _Read] = {}
        self._reading: dict[bytes, None] = {}
        """Keys of the pages that are being read, or have arrived and await their place."""
        self._asked = 0
        """Pages that are being read."""
        self._waiting: dict[Request, int] = {}
        """Tokens that are to be computed of each request that waits, as far as is known."""
        self._waiting_tokens = 0
        """Their sum."""
        self.on_bad_pages: Callable[[list[PageKey]], None] = lambda _: None
        """Told of pages that the disk has lost or spoilt, and of what hangs below them: they have left the index."""
        self.order_saves: Callable[[], None] = lambda: None
        """Orders the copies to the host that are owed; the mover must know of them before it hears of their rows."""
        self.loads = Loads(cache, mover, max_wait=max_wait, order_saves=lambda: self.order_saves())

    @property
    def busy(self) -> bool:
        return bool(self._reads) or self.loads.busy

    def start(self, request: Request, now: float, running: int) -> None:
        cache, size = self._cache, self._cache.page_size
        most = request.reusable // size
        match = cache.match(request.namespace, request.tokens, most * size)
        names: list[PageKey] = []
        on_disk = 0
        if self._index is not None and cache.enabled and match.pages < most:
            names = cache.page_names(request.namespace, request.tokens, most)
            on_disk = self._index.match(names[match.pages :])
            self.stats.disk_queries += most - match.pages
            self.stats.disk_hits += on_disk
            self._index.keep(names[match.pages : match.pages + on_disk])
        request.found = (match.device * size, match.pages * size, (match.pages + on_disk) * size)
        # Whoever waits already comes first, give or take what the schedule policy thinks of it.
        request.turn = now + self.choice.turn(running + self._waiting_tokens)
        self._expect(request, len(request.tokens) - match.pages * size)
        if self._on_arrival or not on_disk:
            self._bring_up(request, names[: match.pages + on_disk], now)
        else:
            self._late.add(request)
        if self.search is not None:
            known = match.pages + on_disk
            patience = min(self._patience(request), self._max_wait)
            self.search.start(request, names, known, (most - known) * size, patience=patience, now=now)

    def ready(self, request: Request, now: float) -> bool:
        if self.search is not None:
            if self.search.pending(request, now):
                return False
            self._take_found(request)
        if request in self._late:
            self._late.discard(request)
            size = self._cache.page_size
            names = self._cache.page_names(request.namespace, request.tokens, request.found[2] // size)
            self._bring_up(request, names, now)
        wait = self._waits.get(request)
        return wait is None or _hold(wait).num_pages >= wait.target or now >= wait.deadline

    def _bring_up(self, request: Request, names: list[PageKey], now: float) -> None:
        """Holds what the host has of the prompt, and reads what the disk has beyond it, up to the last of `names`."""
        cache, size = self._cache, self._cache.page_size
        limit = request.reusable
        match = cache.match(request.namespace, request.tokens, limit)
        on_disk = max(len(names) - match.pages, 0)
        if on_disk:
            pages = Pages(on_disk, self._page_bytes, size)
            turn = max(request.turn - now, 0.0)
            wanted = self.choice.pages_to_read(pages, reading=self._asked, turn=turn, now=now)
            self.stats.declined_pages += on_disk - wanted
            names, on_disk = names[: match.pages + wanted], wanted
            self._expect(request, len(request.tokens) - len(names) * size)
        if not on_disk and match.host <= match.device:
            return
        hold = cache.hold(request.namespace, request.tokens, limit, save=on_disk > 0)
        patience = self._patience(request)
        wait = self._waits[request] = _Wait(
            namespace=request.namespace,
            tokens=request.tokens,
            hold=hold,
            next=hold.num_pages,
            target=len(names) if on_disk and hold.num_pages >= match.pages else hold.num_pages,
            deadline=now + min(patience, self._max_wait),
            keys=names,
        )
        self._issue(wait)

    def _expect(self, request: Request, tokens: int) -> None:
        """So many of the request's tokens will have to be computed."""
        self._waiting_tokens += tokens - self._waiting.pop(request, 0)
        if tokens:
            self._waiting[request] = tokens

    def _patience(self, request: Request) -> float:
        return (request.prefetch or self._policy).patience

    def _take_found(self, request: Request) -> None:
        """Reads what the disk was found to have beyond what the index had known."""
        assert self.search is not None
        found = self.search.take(request)
        if found is None:
            return
        assert self._index is not None
        size = self._cache.page_size
        self.stats.disk_hits += len(found.names) - found.before
        self._index.keep(found.names[found.before :])
        request.found = (*request.found[:2], len(found.names) * size)
        wait = self._waits.get(request)
        if request in self._late:
            return
        if wait is None or not wait.reading:
            # What its host pages hold on to is held again, with what has to be saved before.
            if wait is not None:
                self._waits.pop(request)
                self._cache.drop(_hold(wait), leased=True)
                self._give_up(wait)
            self._bring_up(request, list(found.names), found.asked_at)
        elif wait.target == found.before:
            wait.keys = list(found.names)
            wait.target = len(found.names)
            self._issue(wait)

    def end(self, request: Request) -> None:
        self._late.discard(request)
        self._expect(request, 0)
        if self.search is not None:
            self.search.end(request)
        wait = self._waits.pop(request, None)
        if wait is not None and wait.hold is not None:
            missing = wait.target - wait.hold.num_pages
            if missing > 0:
                self.stats.timed_out += 1
                self.stats.no_room_pages += wait.target - wait.next
            self._cache.drop(wait.hold, leased=request.lease is not None)
            wait.hold = None
            wait.target = min(wait.target, wait.next)
            if not wait.reading:
                self._give_up(wait)
        self.loads.unload(request)

    def poll(self) -> None:
        """Places what has arrived, and asks for more where there was no room before."""
        if self.search is not None:
            for request in self.search.answered():
                self._take_found(request)
        for wait in self._waits.values():
            if wait.arrived or _hold(wait).num_pages < wait.target:
                self._advance(wait)
                self._issue(wait)

    def observe_read(self, move: Move, now: float) -> None:
        """Takes the news of a read: every page once."""
        read = self._reads[move]
        wait = read.wait
        for at in list(read.open):
            outcome = move.outcomes[at]
            if outcome is None:
                continue
            read.open.discard(at)
            wait.reading -= 1
            self._asked -= 1
            page = read.first + at
            if outcome is Outcome.OK:
                read.arrived += 1
                wait.arrived[page] = read.rows[at]
            else:
                self._fail(wait, page, read.rows[at], outcome)
        if not read.measured and (not read.open or read.arrived >= _TYPICAL_SHARE * move.pages):
            read.measured = True
            self.choice.read.measure(read.arrived * self._page_bytes, move.seconds, now)
        if not read.open:
            del self._reads[move]
        if wait.hold is None:
            # Nobody waits for it; but it may be of use to the next one.
            self._advance(wait)
            if not wait.reading:
                self._give_up(wait)

    def _issue(self, wait: _Wait) -> None:
        """Asks for the pages that nobody reads yet, as many as the host has room for."""
        if self._index is None or wait.hold is None:
            return
        while wait.next < wait.target and wait.keys[wait.next].key in self._reading:
            wait.next += 1
        if wait.next >= wait.target:
            return
        rows = self._cache.take_rows(wait.target - wait.next)
        if not rows:
            return
        self.order_saves()
        first, wait.next = wait.next, wait.next + len(rows)
        keys = wait.keys[first : wait.next]
        self._index.lock(keys)
        self._reading.update((key.key, None) for key in keys)
        wait.reading += len(rows)
        self._asked += len(rows)
        self._reads[self._mover.read(keys, rows)] = _Read(wait, first, rows, open=set(range(len(rows))))

    def _advance(self, wait: _Wait) -> None:
        """Puts what has arrived into the tree, heads first; what others brought counts too."""
        cache, size = self._cache, self._cache.page_size
        hold = wait.hold or cache.hold(wait.namespace, wait.tokens, wait.target * size)
        while True:
            cache.extend_hold(hold, wait.tokens, wait.target * size)
            at = hold.num_pages
            rows = []
            while at + len(rows) < wait.target and (row := wait.arrived.get(at + len(rows))) is not None:
                rows.append(row)
            if not rows:
                break
            for page in range(at, at + len(rows)):
                self._forget(wait, page)
            cache.place(hold, wait.tokens, rows)
        for page in [page for page in wait.arrived if page < hold.num_pages]:
            cache.give_rows([wait.arrived[page]])
            self._forget(wait, page)
        if at < wait.target and self._lost(wait, at):
            wait.target = at
            if not wait.reading:
                self._give_up(wait)
        if wait.hold is None:
            cache.drop(hold)

    def _lost(self, wait: _Wait, page: int) -> bool:
        """Whether nobody will bring the page any more."""
        return page in wait.failed or (page < wait.next and wait.keys[page].key not in self._reading)

    def _fail(self, wait: _Wait, page: int, row: int, outcome: Outcome) -> None:
        self._cache.give_rows([row])
        wait.failed.add(page)
        self._forget(wait, page)
        self.stats.failed_pages[outcome.value] = self.stats.failed_pages.get(outcome.value, 0) + 1
        bad = outcome in (Outcome.CORRUPT, Outcome.MISSING)
        if bad and self._index is not None and self._index.is_stored(wait.keys[page]):
            self.on_bad_pages(self._index.remove(wait.keys[page], outcome.value))

    def _forget(self, wait: _Wait, page: int) -> None:
        """The page is no longer on its way."""
        wait.arrived.pop(page, None)
        key = wait.keys[page]
        self._reading.pop(key.key, None)
        if self._index is not None:
            self._index.unlock([key])

    def _give_up(self, wait: _Wait) -> None:
        """Frees what has arrived, but has no place."""
        for page, row in list(wait.arrived.items()):
            self._cache.give_rows([row])
            self._forget(wait, page)

    def reset(self) -> None:
        """The device was lost, and with it every hold: no request waits for anything. Reads that are under way are
        still seen to their end."""
        for wait in self._waits.values():
            wait.hold = None
            wait.target = min(wait.target, wait.next)
            if not wait.reading:
                self._give_up(wait)
        self._waits.clear()
        if self.search is not None:
            self.search.reset()
        self._late.clear()
        self.loads.reset()

    def check(self) -> None:
        """Asserts that every row in hand is accounted for."""
        waits = {id(wait): wait for wait in (*self._waits.values(), *(r.wait for r in self._reads.values()))}
        rows = [row for wait in waits.values() for row in wait.arrived.values()]
        rows += [read.rows[at] for read in self._reads.values() for at in read.open]
        assert sorted(rows) == sorted(self._cache.rows_in_hand), "rows in hand that nobody accounts for"
        assert self._asked == sum(len(read.open) for read in self._reads.values()), "reads do not add up"
        assert self._waiting_tokens == sum(self._waiting.values()), "waiting tokens do not add up"


def _hold(wait: _Wait) -> Hold:
    assert wait.hold is not None, "nobody waits for it"
    return wait.hold
