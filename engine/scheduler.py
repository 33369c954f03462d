"""Chooses what the next step computes: continuous batching with chunked prefill under a token budget.

Pages change hands like this. A waiting request holds none, or, while its prefix is loaded from the host, has room
promised for all of its prompt, so that waiting requests cannot block each other. Admission opens a lease on what the
device has; each chunk and each decode grows it; pages of known tokens are committed to the tree the moment their step is planned,
because the device runs steps in order. So a prefix that is being prefilled already is a hit for the next request,
in the same step even, and is never computed twice. Pages that are given back while a step is in flight are safe
for the same reason: whoever gets them next writes in a later step.

Who gives way is decided by urgency (`schedule_policy.Urgency`), then by age. A step plans the prompts of each urgency
together, running and waiting ones, the most urgent first; so whoever gives way to another has no chunk in the plan yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ..cache.manager import CacheManager
from .plan import Limits, Room, Row, StepPlan, Transfers
from .reading import unclaim
from .request import RUNNING, Request, Status, held_lease
from .schedule_policy import MAX_WAIT, SchedulePolicy, Urgency
from .stats import EngineStats

LOOK_AHEAD = 2
"""Requests at the head of the queue that are loaded while there is no slot for them yet."""


class Scheduler:
    """Owns the waiting and the running requests, their leases and their slots."""

    def __init__(
        self,
        cache: CacheManager,
        limits: Limits,
        policy: SchedulePolicy,
        transfers: Transfers,
        stats: EngineStats,
        *,
        max_wait: float = MAX_WAIT,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of urgency, then of admission; the last is the first to be retracted."""
        self.loading: list[Request] = []
        """Those of the waiting that hold a lease, which is being filled from the host; in order of their leases."""
        self._policy = policy
        self._transfers = transfers
        self._stats = stats
        self._urgency = Urgency(max_wait)
        stats.slots = limits.max_num_seqs
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._step = 0
        self._now = 0.0
        """Of the plan under way."""
        self._short_of_pages = False
        self._last_decoded: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def prefilling_tokens(self) -> int:
        """Positions that are still to be computed of the prompts that run."""
        return sum(left for request in self.running if (left := request.remaining) > 1)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. Takes pages, and commits prompts, for it."""
        self._step += 1
        self._now = now
        self._short_of_pages = False
        if self._urgency.weigh((*self.waiting, *self.running), now):
            self.running.sort(key=self._urgency.of)
        budget, retractions = self.limits.max_num_batched_tokens, self._stats.retractions
        ready, prefilling = self._ready()
        decodes = self._plan_decodes(ready, budget - self._prefill_share(budget, prefilling))
        chunks = self._plan_prompts(prefilling, Room(self.limits, len(decodes)))
        if self._stats.retractions != retractions:
            # A later row may have taken the pages of an earlier decode's request. (Never of a chunk's, whose pages are in
            # the tree by now: chunks are planned in the order in which requests are last to give way.)
            chunks = [row for row in chunks if row.request.status is RUNNING]
            decodes = [row for row in decodes if row.request.status is RUNNING]
        rows = chunks + decodes
        if not rows:
            return None
        for at, row in enumerate(rows):
            request = row.request
            if request.reading is not None:
                rows[at] = row.with_reading()
            request.num_computed = row.start + row.count
            request.in_flight += row.sample
        chunked = [row for row in rows[: len(chunks)] if row.count > 1]
        single = [row for row in rows[: len(chunks)] if row.count == 1]
        return StepPlan(self._step, tuple(chunked), tuple(single + rows[len(chunks) :]))

    def _prefill_share(self, budget: int, prefilling: Sequence[Request]) -> int:
        """Tokens that decodes must leave over, so that both kinds advance however small the budget is."""
        if (self.waiting and self._slots) or prefilling:
            return max(budget // 4, self._step % 2)
        return 0

    def _ready(self) -> tuple[list[Request], list[Request]]:
        """Those that run and have one position to compute, and those that have more. (All of them are asked in every step:
        no properties here.)"""
        ready: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            length = len(request.tokens) + request.in_flight
            left = length - request.num_computed
            if left > 1:
                prefilling.append(request)
            elif left == 1 and (length < request.max_total or not request.generates):
                ready.append(request)
        return ready, prefilling

    def _plan_decodes(self, ready: list[Request], quota: int) -> list[Row]:
        if len(ready) > quota:
            # Those that have waited longest; then in order of age again, which is the order of retraction.
            ready = sorted(ready, key=lambda r: self._last_decoded.get(r.id, 0))[:quota]
            ready.sort(key=self.running.index)
        rows, page_size = [], self.cache.page_size
        for request in ready:
            lease = request.lease
            if lease is None:
                continue  # it has just been retracted
            at = request.num_computed
            # Mostly there is room on the last page.
            if at < len(lease.pages) * page_size or self._grow(request, at + 1):
                self._last_decoded[request.id] = self._step
                rows.append(Row(request, at, 1, request.max_total > request.num_prompt))
        return rows

    def _plan_prompts(self, prefilling: Sequence[Request], room: Room) -> list[Row]:
        """Chunks of prompts: urgency by urgency those of running requests, then those of waiting ones."""
        rows: list[Row] = []
        if not prefilling and not self.waiting:
            return rows
        running, waiting = self._urgency.levels(prefilling), self._urgency.levels(self.waiting)
        admitting = not self._short_of_pages
        for level in sorted(running.keys() | waiting.keys()):
            rows += self._plan_prefills(running.get(level, []), room)
            if level in waiting and admitting:
                more, admitting = self._admit(waiting[level], room)
                rows += more
        return rows

    def _plan_prefills(self, running: Sequence[Request], room: Room) -> list[Row]:
        rows = []
        for request in running:
            if room.left <= 0:
                break
            if request.status is Status.RUNNING:
                row = self._plan_chunk(request, room)
                if row is not None:
                    rows.append(row)
        return rows

    def _plan_chunk(self, request: Request, room: Room) -> Row | None:
        """The next chunk of a prompt: after what others have computed of it meanwhile, as much as there is room for."""
        lease = held_lease(request)
        shared = self.cache.extend(lease, request.tokens, request.reusable)
        if shared > request.num_computed:
            # Forced tokens of an answer are computed in chunks too, but a hit is of the prompt.
            hit = min(shared, request.num_prompt) - request.num_computed
            self._count_hit(request, max(hit, 0))
            request.num_computed = shared
        start = request.num_computed
        count = min(request.remaining, room.left)
        if not self._grow(request, start + count):
            return None
        # What is to be read is shared only once all of it is computed: the tree may hold these pages already, and none of
        # them is to be written again.
        end = start + count if request.reading is None else min(start + count, request.reading.first)
        self.cache.commit(lease, request.tokens, end)
        room.take(count)
        return Row(request, start, count, sample=request.generates and start + count == request.length)

    def _admit(self, waiting: Sequence[Request], room: Room) -> tuple[list[Row], bool]:
        """First chunks of waiting requests of one urgency, and whether less urgent ones may be looked at, too."""
        rows: list[Row] = []
        if self._short_of_pages:
            return rows, False
        order = self._policy.order(waiting, self._match_length, self._now)
        if room.left <= 0 or not self._slot_for(order[0]):
            self._load_ahead(order)
            return rows, False
        fits = True
        for request in list(order):
            if room.left <= 0 or not self._slot_for(request):
                return rows, False
            # The token of a retracted request may still be in flight; it must be known before its KV is recomputed.
            if request.in_flight:
                continue
            if request.lease is None:
                # One that has no pages keeps out those behind it, but not those that have theirs: it may wait for that.
                fits = fits and (not self._transfers.ready(request, self._now) or self._open(request))
                if request.lease is None:
                    continue
            if not self._loaded(request):
                continue
            if not self._slots:
                self._retract(self.running[-1])
            self._start(request)
            row = self._plan_chunk(request, room)
            if row is not None:
                rows.append(row)
        return rows, fits

    def _slot_for(self, request: Request) -> bool:
        """There is a free slot, or one of a less urgent request."""
        return bool(self._slots) or self._urgency.of(self.running[-1]) > self._urgency.of(request)

    def _load_ahead(self, order: Sequence[Request]) -> None:
        """Fills the time until a slot is free: the next requests' pages come up from the host meanwhile."""
        for request in order[:LOOK_AHEAD]:
            if (
                request.in_flight
                or request.lease is not None
                or not self._transfers.ready(request, self._now)
            ):
                continue
            loadable = request.may_load and self._transfers.loadable(request)
            if loadable and self._open(request):
                self._loaded(request)

    def _open(self, request: Request) -> bool:
        """Leases what the device has of the prefix, if there is room for the rest beside what others will still need.

        Less urgent requests give way to it, unless even all of them would not do.
        """
        lease = self.cache.open(request.namespace, request.tokens, request.reusable)
        needed = self._pages(len(request.tokens) + 1) - len(lease.pages)
        # The first to give way at the end.
        yielding = self._urgency.below(request, (*self.running, *self.loading))
        held = sum(len(held_lease(r).pages) for r in yielding)
        others = [r for r in (*self.running, *self.loading) if r not in yielding]
        if others and needed + self._promised(others) > self.cache.available() + held:
            self.cache.release(lease)
            return False
        while yielding and needed + self._promised((*others, *yielding)) > self.cache.available():
            self._give_way(yielding.pop())
        request.lease = lease
        return True

    def _promised(self, requests: Iterable[Request]) -> int:
        """Pages that these will still need for what is known of them."""
        return sum(self._pages(r.length + 1) - len(held_lease(r).pages) for r in requests)

    def _give_way(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._retract(request)
        else:
            self._unload(request)

    def _loaded(self, request: Request) -> bool:
        """Whether a request with a lease can start; begins to load what the host has for it."""
        if request in self.loading:
            if not self._transfers.loaded(request, self._now):
                return False
            self.loading.remove(request)
            return True
        if not request.may_load or not self._transfers.load(request):
            return True
        self.loading.append(request)
        return False

    def _start(self, request: Request) -> None:
        lease = held_lease(request)
        self.waiting.remove(request)
        request.waited += self._now - request.waiting_since
        self._transfers.end(request)
        request.status = Status.RUNNING
        request.slot = self._slots.pop()
        request.residency += 1
        request.num_computed = lease.num_shared * self.cache.page_size
        if request.residency == 1:
            request.first_scheduled = self._now
            self._stats.count_query(request.num_prompt, request.found)
        self._count_hit(request, request.num_computed)
        # Before the less urgent ones, whose chunks are not planned yet.
        place = len(self.running)
        while place and self._urgency.of(self.running[place - 1]) > self._urgency.of(request):
            place -= 1
        self.running.insert(place, request)

    def _count_hit(self, request: Request, tokens: int) -> None:
        # What a retracted request finds of its own on its return is no hit.
        if request.residency == 1:
            self._stats.count_hit(request.add_hit(tokens))

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens, at the cost of the last of the running; False if it was itself the last."""
        while not self.cache.grow(held_lease(request), num_tokens):
            if self.loading:
                self._unload(self.loading[-1])
                continue
            victim = self.running[-1]
            self._short_of_pages = True
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _unload(self, request: Request) -> None:
        """Takes a waiting request's pages away again."""
        self.loading.remove(request)
        self._transfers.unload(request)
        self.cache.release(held_lease(request))
        request.lease = None

    def _retract(self, request: Request) -> None:
        """Sends a running request back to the head of the queue; the tree keeps its pages until they are needed."""
        self._stats.retractions += 1
        self._leave(request)
        request.status = Status.WAITING
        request.waiting_since = self._now
        request.num_computed = 0
        self.waiting.appendleft(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and gives back its pages and its slot; its whole pages stay cached."""
        if request.status is Status.RUNNING:
            self._leave(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
            if request in self.loading:
                self._unload(request)
        self._transfers.end(request)
        request.status = Status.FINISHED

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._last_decoded.pop(request.id, None)
        self._slots.append(request.slot)
        request.slot = -1
        self.commit(request)
        self.cache.release(held_lease(request))
        request.lease = None

    def commit(self, request: Request) -> None:
        """Shares the whole pages of what is computed and known, prompt and output alike."""
        lease, known, length = request.lease, request.num_computed, len(request.tokens)
        assert lease is not None
        if known > length:
            known = length
        if known >= (lease.num_shared + 1) * self.cache.page_size:
            self.cache.commit(lease, request.tokens, known)

    def lose_device(self) -> list[Request]:
        """After a fault took the device's pages: empties that tier; returns the running requests, now out of it."""
        lost, self.running = self.running, []
        self.cache.reset(self._transfers.reset())
        for request in self.loading:
            request.lease = None
        self.loading.clear()
        for request in lost:
            self._slots.append(request.slot)
            request.slot, request.lease, request.status = -1, None, Status.FINISHED
        for request in self.waiting:
            request.in_flight = 0
            if request.reading is not None:
                unclaim(request.reading)
        self._last_decoded.clear()
        return lost

    def check(self) -> None:
        """Asserts the invariants of scheduler and cache together; for tests, between steps."""
        running: Iterable[Request] = self.running
        self.cache.check([held_lease(r) for r in (*running, *self.loading)])
        slots = [r.slot for r in self.running]
        assert sorted(slots + self._slots) == list(range(self.limits.max_num_seqs)), "slots do not add up"
        urgencies = [self._urgency.of(r) for r in self.running]
        assert urgencies == sorted(urgencies), "a less urgent request would give way later"
        for r in self.running:
            assert r.status is Status.RUNNING
            assert 0 <= r.num_computed < r.length + (not r.generates), "positions out of order"
            assert r.length <= r.max_total, "more tokens than there is room for"
            assert len(held_lease(r).pages) * self.cache.page_size >= r.num_computed, "KV without a page"
        for r in self.waiting:
            assert r.status is Status.WAITING
            assert r.slot == -1, "a waiting request has a slot"
            assert (r.lease is not None) == (r in self.loading), "a waiting request holds something"
        self._transfers.check()

    def _match_length(self, request: Request) -> int:
        match = self.cache.match(request.namespace, request.tokens, request.reusable)
        return match.pages * self.cache.page_size

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.page_size)
