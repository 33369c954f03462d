"""The engine's loop, free of jax and of wall clocks: production and simulation differ in executor, transfers and clock.

step n + 1 is planned and submitted      | the device runs step n
step n's tokens are collected and judged | the device runs step n + 1

Where a token of step n + 1 is constrained, its forward is submitted all the same, and the device goes on to sample when
step n's tokens are known and the host has found out which may follow them: that, too, while the forward runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..cache.manager import CacheManager
from .constraint import ConstraintError
from .plan import Executor, Limits, NoTransfers, Row, Sampled, StepPlan, Transfers
from .request import FINISHED, RUNNING, Delta, FinishReason, Request, TokenLogprob
from .schedule_policy import SchedulePolicy
from .scheduler import Scheduler
from .stats import EngineStats

if TYPE_CHECKING:
    from .plan import Mask

logger = logging.getLogger(__name__)

JUMP_SHARE = 0.25
"""Tokens that a jump must save for each running request. A chunk of a few tokens pads a step of 16 rows to 32, which
costs all of them more than a jump over two or three tokens saves."""


class EngineLoop:
    """Runs requests to their ends. Not thread safe: one thread calls everything here."""

    def __init__(
        self,
        cache: CacheManager,
        executor: Executor,
        limits: Limits,
        policy: SchedulePolicy,
        *,
        clock: Callable[[], float],
        transfers: Transfers | None = None,
        stats: EngineStats | None = None,
        on_end: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """`on_end` hears of every request that has ended, before its caller does."""
        self.stats = stats or EngineStats()
        self._transfers = transfers or NoTransfers()
        self.scheduler = Scheduler(cache, limits, policy, self._transfers, self.stats)
        self._cache = cache
        self._executor = executor
        self._clock = clock
        self._on_end = on_end
        self._in_flight: deque[StepPlan] = deque()
        self._requests: dict[str, Request] = {}
        self._busy_since = 0.0
        self._waited = 0.0
        self._update_gauges()

    @property
    def idle(self) -> bool:
        """Nothing to run, nothing in flight, and nothing to move between the tiers."""
        return not self._requests and not self._in_flight and not self._transfers.busy

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._requests)

    def add(self, request: Request) -> None:
        """Takes in a validated request. Raises ValueError for an id that is in use."""
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in use")
        now = self._clock()
        request.arrival = request.waiting_since = now
        self._cache.tiers.expire(now)
        self._requests[request.id] = request
        if request.may_load:
            self._transfers.start(request, now, self.scheduler.prefilling_tokens)
        self.scheduler.add(request)
        self.stats.waiting = len(self.scheduler.waiting)

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and ended ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort", Delta(request, [], "", []))
            self._update_gauges()

    def step(self) -> bool:
        """One turn: place what has arrived, schedule and submit, collect and commit what is older, send pages down.

        Returns False when there was nothing to do but wait.
        """
        started = self._clock()
        self._waited = 0.0
        self._cache.tiers.expire(started)
        self._transfers.poll(started)
        plan = self._schedule(started)
        collects = len(self._in_flight) > (plan is not None)
        if collects:
            self._collect()
        if plan is not None and plan.constrained:
            self._choose(plan)
        self._transfers.after_step(self._clock())
        self._update_gauges()
        self.stats.host_seconds += self._clock() - started - self._waited
        return plan is not None or collects

    def tend(self) -> None:
        """Now and then while there are no steps: looks after what time alone brings, in the cache and on the disk."""
        now = self._clock()
        self._cache.tiers.expire(now)
        self._transfers.poll(now)
        self._transfers.after_step(now)
        self._update_gauges()

    def _schedule(self, now: float) -> StepPlan | None:
        plan = self.scheduler.plan(now)
        if plan is None:
            return None
        try:
            self._transfers.before_step()
            self._executor.submit(plan)
        except Exception as error:
            self._fail(error)
            return None
        if not self._in_flight:
            self._busy_since = now
        self._in_flight.append(plan)
        self.stats.steps += 1
        self.stats.computed_tokens += plan.num_tokens
        return plan

    def _collect(self) -> None:
        plan = self._in_flight[0]
        started = self._clock()
        try:
            collected = self._executor.collect()
        except Exception as error:
            self._fail(error)
            return
        self._in_flight.popleft()
        now = self._clock()
        self._waited = now - started
        if plan.chunks:
            self._transfers.prefilled(plan.num_tokens, now - self._busy_since, now)
        self.stats.device_busy_seconds += now - self._busy_since
        self._busy_since = now
        for row, part in zip([row for row in plan.rows if row.read], collected.read, strict=True):
            assert row.request.reading is not None
            # Each reading gets the parts of its own kind.
            row.request.reading.add(part)  # pyright: ignore[reportArgumentType]
        for row, token in zip(plan.sampling, collected.sampled, strict=True):
            request = row.request
            # What lies behind its end is known already where a token was forced, and taken before.
            if request.status is not FINISHED and row.start + row.count >= len(request.tokens):
                request.in_flight -= 1
                self._accept(request, token, now)
        if len(plan.sampling) < len(plan.rows):
            self._end_prompts(plan)

    def _end_prompts(self, plan: StepPlan) -> None:
        """Ends those that wanted no more than their prompt computed."""
        for row in plan.rows:
            request = row.request
            ends = not row.sample and not request.generates and row.start + row.count == request.num_prompt
            if ends and request.status is not FINISHED:
                self._finish(request, "length", Delta(request, [], "", []))

    def _choose(self, plan: StepPlan) -> None:
        """Lets a step sample, now that all earlier tokens are known."""
        if not self._in_flight or self._in_flight[-1] is not plan:
            return  # what was collected meanwhile was a fault
        masks = [self._mask(row) for row in plan.sampling]
        try:
            self._executor.choose(masks)
        except Exception as error:
            self._fail(error)

    def _mask(self, row: Row) -> Mask | None:
        """What the row's token may be; None = anything, also where it is of no interest any more."""
        request, matcher = row.request, row.request.matcher
        if matcher is None or request.status is FINISHED:
            return None
        if matcher.ended:
            self._finish(request, "stop", Delta(request, [], "", []))
            return None
        mask = matcher.mask
        self.stats.masks += 1
        if request.jumps and self._pays(len(matcher.forced) - 1):
            self._jump(request, matcher.forced)
        return mask

    def _pays(self, saved: int) -> bool:
        """Whether to save one request so many steps of its own is worth a step that is longer for all who run."""
        return saved > 0 and saved >= JUMP_SHARE * len(self.scheduler.running)

    def _jump(self, request: Request, forced: Sequence[int]) -> None:
        """Takes over what the constraint leaves no choice about: it is computed in one chunk, like a prompt.

        The token that the row under way will sample is the first of them, and is passed over then.
        """
        request.in_flight = 0
        now = self._clock()
        for token_id in list(forced):
            self.stats.jumped_tokens += 1
            self._accept(request, Sampled(token_id, 0.0), now)
            if request.status is FINISHED:
                return

    def _accept(self, request: Request, sampled: Sampled, now: float) -> None:
        """Adds a token to its request, and ends the request if the token says so."""
        token_id, params, tokens = sampled.token_id, request.params, request.tokens
        tokens.append(token_id)
        self.stats.generated_tokens += 1
        if request.first_token is None:
            request.first_token = now
        ended = token_id in request.stop_ids and request.num_output > params.min_tokens
        heard = request.on_delta is not None or request.text is not None or request.matcher is not None
        if not heard and not ended and len(tokens) < request.max_total:
            # Nobody listens, and nothing is looked for in its text.
            if request.status is RUNNING:
                self.scheduler.commit(request)
            return
        delta = Delta(request, [token_id], "", [])
        reason: FinishReason | None = None
        # The end token is no part of the answer: it has neither text nor log-probs. But those who score a prompt count
        # on one entry for each token.
        if params.logprobs is not None and not (ended and request.reading is None):
            delta.logprobs.append(TokenLogprob(token_id, sampled.logprob, sampled.top[: params.logprobs]))
        if ended:
            reason = "stop"
        elif request.matcher is not None and (error := self._follow(request, token_id)) is not None:
            delta.error, reason = error, "error"
        else:
            stopped = False
            if request.text is not None:
                delta.text, stopped = request.text.append(token_id)
            if stopped or (request.matcher is not None and request.matcher.ended):
                reason = "stop"
            elif len(tokens) >= request.max_total:
                reason = "length"
        if reason is not None:
            self._finish(request, reason, delta)
            return
        if request.status is RUNNING:
            self.scheduler.commit(request)
        _emit(delta)

    def _follow(self, request: Request, token_id: int) -> str | None:
        """Tells the request's matcher of a token; returns what is wrong, since no answer goes on without its constraint."""
        assert request.matcher is not None
        self.stats.constrained_tokens += 1
        started = self._clock()
        try:
            request.matcher.advance(token_id)
        except ConstraintError as error:
            return str(error)
        finally:
            self.stats.mask_seconds += self._clock() - started
        return None

    def _finish(self, request: Request, reason: FinishReason, delta: Delta) -> None:
        self.scheduler.finish(request)
        self._end(request, reason, delta)

    def _end(self, request: Request, reason: FinishReason, delta: Delta) -> None:
        del self._requests[request.id]
        if request.text is not None:
            delta.text += request.text.flush()
        request.finish_reason = delta.finish_reason = reason
        request.finished_at = self._clock()
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self._on_end(request)
        _emit(delta)

    def _fail(self, error: Exception) -> None:
        """A step failed on the device: its pages are lost, so running requests end with an error and the rest go on."""
        logger.error(
            "a step failed on the device; running requests end, the cache starts empty", exc_info=error
        )
        self.stats.faults += 1
        self._in_flight.clear()
        self._executor.reset()
        for request in self.scheduler.lose_device():
            # A callback may have ended it, as a choice of the same call.
            if request.id not in self._requests:
                continue
            message = f"the step failed on the device: {type(error).__name__}: {error}"
            self._end(request, "error", Delta(request, [], "", [], error=message))

    def _update_gauges(self) -> None:
        stats, cache, device = self.stats, self._cache, self._cache.device
        stats.waiting, stats.running = len(self.scheduler.waiting), len(self.scheduler.running)
        stats.pages_total, stats.pages_free = cache.num_pages, device.free
        stats.pages_evictable, stats.pages_in_use = device.evictable, device.in_use
        stats.evicted_pages = cache.stats.evicted_pages


def _emit(delta: Delta) -> None:
    if delta.request.on_delta is not None:
        delta.request.on_delta(delta)
