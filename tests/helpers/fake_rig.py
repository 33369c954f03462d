"""A rig that drives the real loop on the fake device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from tierax.cache.manager import CacheManager
from tierax.engine.constraint import Matcher
from tierax.engine.loop import EngineLoop
from tierax.engine.plan import Limits, NoTransfers, Transfers
from tierax.engine.reading import Reading
from tierax.engine.request import Delta, OutputText, Request, SamplingParams
from tierax.engine.schedule_policy import FCFS, SchedulePolicy

from .fake_executor import (
    FakeExecutor,
    ManualClock,
    Model,
    hash_model,
    solo,
)


class FakeTransfers(NoTransfers):
    """Implements `plan.Transfers`: a request is ready once the clock has passed its time in `ready_at`."""

    def __init__(self) -> None:
        self.ready_at: dict[str, float] = {}
        self.started: list[str] = []
        self.ended: list[str] = []
        self.polls = 0

    def start(self, request: Request, now: float, running: int) -> None:
        self.started.append(request.id)

    def poll(self, now: float) -> None:
        self.polls += 1

    def ready(self, request: Request, now: float) -> bool:
        return now >= self.ready_at.get(request.id, 0.0)

    def end(self, request: Request) -> None:
        if request.id not in self.ended:
            self.ended.append(request.id)


class Rig:
    """The real loop, scheduler and cache on a fake device; `check()` holds after every step."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        seqs: int = 4,
        budget: int = 32,
        shared: int | None = None,
        policy: SchedulePolicy | None = None,
        transfers: Transfers | None = None,
        enabled: bool = True,
        model: Model = hash_model,
        clock: ManualClock | None = None,
        **cache: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.cache = CacheManager(pages, page_size, enabled=enabled, clock=self.clock, **cache)
        self.device = FakeExecutor(pages, page_size, self.clock, model=model)
        transfers = self.transfers(transfers)
        self.loop = EngineLoop(
            self.cache,
            self.device,
            Limits(seqs, budget, shared),
            policy or FCFS(),
            clock=self.clock,
            transfers=transfers,
        )
        self.deltas: dict[str, list[Delta]] = {}
        self.budget = budget
        self._model = model

    def transfers(self, given: Transfers | None) -> Transfers | None:
        """The loop's transfers; overridden where there are tiers."""
        return given

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 6,
        *,
        id: str | None = None,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        namespace: bytes = b"",
        priority: int = 0,
        text: OutputText | None = None,
        reading: Reading | None = None,
        matcher: Matcher | None = None,
        **params: object,
    ) -> Request:
        """A request as the engine would make it, its output clipped to the pool."""
        name = id if id is not None else f"r{len(self.deltas)}"
        deltas = self.deltas[name] = []
        return Request(
            id=name,
            tokens=array("i", prompt),
            num_prompt=len(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),  # pyright: ignore[reportArgumentType]
            seed=seed,
            stop_ids=frozenset(stop_ids),
            max_total=min(len(prompt) + max_tokens, self.cache.capacity_tokens),
            namespace=namespace,
            priority=priority,
            text=text,
            reading=reading,
            matcher=matcher,
            on_delta=deltas.append,
        )

    def add(self, prompt: Sequence[int], max_tokens: int = 6, **options: object) -> Request:
        request = self.request(prompt, max_tokens, **options)  # pyright: ignore[reportArgumentType]
        self.loop.add(request)
        return request

    def step(self) -> bool:
        plans = len(self.device.plans)
        busy = self.loop.step()
        self.loop.scheduler.check()
        assert len(self.device.plans) <= plans + 1
        assert all(plan.num_tokens <= self.budget for plan in self.device.plans[plans:]), "over the budget"
        return busy

    def run(self, most_steps: int = 3000) -> int:
        """Steps until nothing is left to do, and checks that nothing is held then; returns how many it took."""
        for count in range(most_steps):
            if self.loop.idle:
                self.cache.check()
                assert self.cache.in_use == self.cache.host.in_use == 0
                return count
            if not self.step():
                self.clock.advance(0.001)
        raise AssertionError(f"not idle after {most_steps} steps: {self.loop.request_ids}")

    def output(self, request: Request) -> list[int]:
        """The generated tokens, which must be what the deltas brought."""
        output = list(request.tokens[request.num_prompt :])
        assert [token for delta in self.deltas[request.id] for token in delta.token_ids] == output
        return output

    def expect_solo(self, request: Request, matcher: Matcher | None = None) -> None:
        """Asserts that the request ended by itself with the tokens that it would have had alone.

        `matcher`: a new one of its constraint.
        """
        assert (matcher is None) == (request.matcher is None)
        expected = solo(request, self._model, matcher)
        assert self.output(request) == expected, request.id
        stopped = (
            bool(expected) and expected[-1] in request.stop_ids and len(expected) > request.params.min_tokens
        )
        stopped = stopped or (matcher is not None and matcher.ended)
        assert request.finish_reason == ("stop" if stopped else "length")
