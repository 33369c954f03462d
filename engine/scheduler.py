"""Chooses what the next step computes: continuous batching with chunked prefill under a token budget.

Pages change hands like this. A waiting request holds none, or, while its prefix is loaded from the host, has room
promised for all of its prompt, so that waiting requests cannot block each other. Admission opens a lease on what the
device has; each chunk and each decode grows it; pages of known tokens are committed to the tree the moment their step is planned,
because the device runs steps in order. So a prefix that is being prefilled already is a hit for the next request,
in the same step even, and is never computed twice. Pages that are given back while a step is in flight are safe
for the same reason: whoever gets them next writes in a later step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cache.manager import CacheManager, Lease
from .plan import Row, StepPlan, Transfers
from .request import Request, Status
from .schedule_policy import SchedulePolicy
from .stats import EngineStats

LOOK_AHEAD = 2
"""Requests at the head of the queue that are loaded while there is no slot for them yet."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """Owns the waiting and the running requests, their leases and their slots."""

    def __init__(
        self,
        cache: CacheManager,
        limits: Limits,
        policy: SchedulePolicy,
        transfers: Transfers,
        stats: EngineStats,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of admission; the last is the first to be retracted."""
        self.loading: list[Request] = []
        """Those of the waiting that hold a lease, which is being filled from the host; in order of their leases."""
        self._policy = policy
        self._transfers = transfers
        self._stats = stats
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._step = 0
        self._short_of_pages = False
        self._last_decoded: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. Takes pages, and commits prompts, for it."""
        self._step += 1
        self._short_of_pages = False
        budget = self.limits.max_num_batched_tokens
        decodes = self._plan_decodes(budget - self._prefill_share(budget))
        chunks = self._plan_prefills(budget - len(decodes))
        chunks += self._admit(budget - len(decodes) - sum(row.count for row in chunks), now)
        # A later row may have taken the pages of an earlier decode's request. (Never of a chunk's, whose pages are in
        # the tree by now: chunks are planned in order of age, and the youngest request gives way.)
        rows = [row for row in (*chunks, *decodes) if row.request.status is Status.RUNNING]
        if not rows:
            return None
        for row in rows:
            row.request.num_computed = row.start + row.count
            row.request.in_flight += row.sample
        return StepPlan(
            self._step,
            chunks=tuple(row for row in rows if row.count > 1),
            decodes=tuple(row for row in rows if row.count == 1),
        )

    def _prefill_share(self, budget: int) -> int:
        """Tokens that decodes must leave over, so that both kinds advance however small the budget is."""
        may_admit = self.waiting and self._slots
        if not may_admit and all(_remaining(r) <= 1 for r in self.running):
            return 0
        return max(budget // 4, self._step % 2)

    def _plan_decodes(self, quota: int) -> list[Row]:
        ready = [r for r in self.running if _remaining(r) == 1 and r.length < r.max_total]
        if len(ready) > quota:
            # Those that have waited longest; then in order of age again, which is the order of retraction.
            ready = sorted(ready, key=lambda r: self._last_decoded.get(r.id, 0))[:quota]
            ready.sort(key=self.running.index)
        rows = []
        for request in ready:
            if request.status is Status.RUNNING and self._grow(request, request.length):
                self._last_decoded[request.id] = self._step
                rows.append(Row(request, request.num_computed, 1, sample=True))
        return rows

    def _plan_prefills(self, budget: int) -> list[Row]:
        rows = []
        for request in list(self.running):
            if budget <= 0:
                break
            if request.status is Status.RUNNING and _remaining(request) > 1:
                row = self._plan_chunk(request, budget)
                if row is not None:
                    rows.append(row)
                    budget -= row.count
        return rows

    def _plan_chunk(self, request: Request, budget: int) -> Row | None:
        """The next chunk of a prompt: after what others have computed of it meanwhile, as much as the budget allows."""
        lease = _lease(request)
        shared = self.cache.extend(lease, request.tokens, len(request.tokens) - 1)
        if shared > request.num_computed:
            self._count_hit(request, shared - request.num_computed)
            request.num_computed = shared
        start = request.num_computed
        count = min(_remaining(request), budget)
        if not self._grow(request, start + count):
            return None
        self.cache.commit(lease, request.tokens, start + count)
        return Row(request, start, count, sample=start + count == request.length)

    def _admit(self, budget: int, now: float) -> list[Row]:
        rows: list[Row] = []
        if not self.waiting or self._short_of_pages:
            return rows
        order = self._policy.order(list(self.waiting), self._match_length, now)
        if budget <= 0 or not self._slots:
            self._load_ahead(order, now)
            return rows
        for request in list(order):
            if budget <= 0 or not self._slots:
                break
            # The token of a retracted request may still be in flight; it must be known before its KV is recomputed.
            if request.in_flight or (request.lease is None and not self._transfers.ready(request, now)):
                continue
            if request.lease is None and not self._open(request):
                break
            if not self._loaded(request, now):
                continue
            self._start(request, now)
            row = self._plan_chunk(request, budget)
            if row is not None:
                rows.append(row)
                budget -= row.count
        return rows

    def _load_ahead(self, order: Sequence[Request], now: float) -> None:
        """Fills the time until a slot is free: the next requests' pages come up from the host meanwhile."""
        for request in order[:LOOK_AHEAD]:
            if request.in_flight or request.lease is not None or not self._transfers.ready(request, now):
                continue
            if self._transfers.loadable(request) and self._open(request):
                self._loaded(request, now)

    def _open(self, request: Request) -> bool:
        """Leases what the device has of the prefix, if there is room for the rest beside what others will still need."""
        lease = self.cache.open(request.namespace, request.tokens, len(request.tokens) - 1)
        needed = self._pages(len(request.tokens) + 1) - len(lease.pages)
        others = (*self.running, *self.loading)
        promised = sum(self._pages(r.length + 1) - len(_lease(r).pages) for r in others)
        if others and needed + promised > self.cache.available():
            self.cache.release(lease)
            return False
        request.lease = lease
        return True

    def _loaded(self, request: Request, now: float) -> bool:
        """Whether a request with a lease can start; begins to load what the host has for it."""
        if request in self.loading:
            if not self._transfers.loaded(request, now):
                return False
            self.loading.remove(request)
            return True
        if not self._transfers.load(request):
            return True
        self.loading.append(request)
        return False

    def _start(self, request: Request, now: float) -> None:
        lease = _lease(request)
        self.waiting.remove(request)
        self._transfers.end(request)
        request.status = Status.RUNNING
        request.slot = self._slots.pop()
        request.residency += 1
        request.num_computed = lease.num_shared * self.cache.page_size
        if request.residency == 1:
            request.first_scheduled = now
            self._stats.count_query(request.num_prompt, request.found)
        self._count_hit(request, request.num_computed)
        self.running.append(request)

    def _count_hit(self, request: Request, tokens: int) -> None:
        # What a retracted request finds of its own on its return is no hit.
        if request.residency == 1:
            self._stats.count_hit(request.add_hit(tokens))

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens, at the cost of the youngest requests; False if it was itself the youngest."""
        while not self.cache.grow(_lease(request), num_tokens):
            if self.loading:
                self._unload(self.loading[-1])
                continue
            victim = self.running[-1]
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _unload(self, request: Request) -> None:
        """Takes a waiting request's pages away again."""
        self.loading.remove(request)
        self._transfers.unload(request)
        self.cache.release(_lease(request))
        request.lease = None

    def _retract(self, request: Request) -> None:
        """Sends a running request back to the head of the queue; the tree keeps its pages until they are needed."""
        self._stats.retractions += 1
        self._short_of_pages = True
        self._leave(request)
        request.status = Status.WAITING
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
        self.cache.release(_lease(request))
        request.lease = None

    def commit(self, request: Request) -> None:
        """Shares the whole pages of what is computed and known, prompt and output alike."""
        self.cache.commit(_lease(request), request.tokens, min(request.num_computed, len(request.tokens)))

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
        self._last_decoded.clear()
        return lost

    def check(self) -> None:
        """Asserts the invariants of scheduler and cache together; for tests, between steps."""
        running: Iterable[Request] = self.running
        self.cache.check([_lease(r) for r in (*running, *self.loading)])
        slots = [r.slot for r in self.running]
        assert sorted(slots + self._slots) == list(range(self.limits.max_num_seqs)), "slots do not add up"
        for r in self.running:
            assert r.status is Status.RUNNING
            assert 0 <= r.num_computed < r.length <= r.max_total, "positions out of order"
            assert len(_lease(r).pages) * self.cache.page_size >= r.num_computed, "KV without a page"
        for r in self.waiting:
            assert r.status is Status.WAITING
            assert r.slot == -1, "a waiting request has a slot"
            assert (r.lease is not None) == (r in self.loading), "a waiting request holds something"
        self._transfers.check()

    def _match_length(self, request: Request) -> int:
        return self.cache.match_length(request.namespace, request.tokens)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.page_size)


def _remaining(request: Request) -> int:
    """Positions to compute before the next token can be sampled, that token's own input included."""
    return request.length - request.num_computed


def _lease(request: Request) -> Lease:
    assert request.lease is not None, "the request is not running"
    return request.lease
