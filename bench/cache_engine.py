"""An engine of a given cache that is driven step by step in the caller's thread, so that a benchmark sees every moment."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from tqdm import tqdm

from ..cache.radix_tree import DEVICE, HOST
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.request import Request, SamplingParams, TokenLogprob
from .bounds import Clock

WAIT = 0.0005
"""Seconds before looking again when all that runs waits for a movement between tiers."""
SETTLE_LIMIT = 120.0
"""Seconds within which all movements must be done."""


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """Makes engines of one model that differ in their caches."""

    model: str
    clock: Clock
    options: dict[str, Any] = field(default_factory=dict)
    """Settings that all of them share, by the names of `EngineConfig`."""
    progress: bool = True
    """A bar on stderr for the warm-up."""

    @contextmanager
    def open(
        self, *, wrap_store: Callable[[Any], Any] = lambda store: store, **cache: Any
    ) -> Iterator[Driver]:
        """A warm engine with these further settings; its memory is given back in the end."""
        config = EngineConfig.create(self.model, **self.options | cache)
        engine = Engine(config, clock=self.clock, wrap_store=wrap_store)
        try:
            bar = partial(
                tqdm,
                desc="preparing step programs",
                unit="program",
                total=engine.num_programs,
                leave=False,
                disable=not self.progress,
            )
            engine.warm_up(bar)
            yield Driver(engine)
        finally:
            engine.close()
            del engine
            gc.collect()

    def page(self) -> PageSize:
        """What a page of this model takes; loads the model to find out."""
        tiny = self.options | {"device_cache_size": "64MiB", "skip_warmup": True, "host_cache_size": 0}
        engine = Engine(EngineConfig.create(self.model, **tiny), clock=self.clock)
        try:
            return PageSize(engine.cache.page_size, engine.page_bytes, engine.model_config.vocab_size)
        finally:
            engine.close()
            del engine
            gc.collect()


@dataclass(frozen=True, slots=True)
class PageSize:
    """Of one model's cache."""

    tokens: int
    bytes: int
    vocab_size: int

    def pool_bytes(self, tokens: int) -> int:
        """Of a device pool with room for so many tokens, its scratch page included."""
        return (-(-tokens // self.tokens) + 1) * self.bytes


class Driver:
    """Sends greedy requests to one engine and turns its loop."""

    def __init__(self, engine: Engine, sleep: Callable[[float], None] = time.sleep) -> None:
        self.engine = engine
        self._sleep = sleep
        self._calls = 0

    def send(self, prompt: Sequence[int], max_tokens: int) -> Request:
        """A request that arrives now."""
        self._calls += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        (request,) = self.engine.make_requests(list(prompt), params, request_id=f"bench-{self._calls}")
        self.engine.loop.add(request)
        return request

    def turn(self) -> None:
        """One step, or a short wait when nothing can be computed."""
        if not self.engine.loop.step():
            self._sleep(WAIT)

    def answer(self, prompt: Sequence[int], max_tokens: int = 1) -> Request:
        """Sends a request and sees it through."""
        request = self.send(prompt, max_tokens)
        self.finish([request])
        return request

    def finish(self, requests: Sequence[Request]) -> None:
        """Turns until these requests have ended as they should, whatever else is under way."""
        while any(request.finished_at is None for request in requests):
            self.turn()
        for request in requests:
            if request.finish_reason != "length":
                raise RuntimeError(f"a request of the benchmark ended by {request.finish_reason!r}")

    def settle(self) -> None:
        """Turns until nothing is left to do: every page is where the write policy wants it, and acknowledged there."""
        clock = self.engine.clock
        started = clock()
        while not self.engine.loop.idle:
            self.turn()
            if clock() - started > SETTLE_LIMIT:
                raise RuntimeError(f"movements between the tiers did not end within {SETTLE_LIMIT:g} s")

    def forget(self, *tiers: Literal["device", "host"]) -> None:
        """Drops what these tiers hold, once all is settled."""
        self.settle()
        for tier in tiers:
            self.engine.cache.clear({"device": DEVICE, "host": HOST}[tier])

    def top_two_gap(self, prompt: Sequence[int]) -> float:
        """Between the log-probs of the two likeliest tokens after a prompt."""
        self._calls += 1
        seen: list[TokenLogprob] = []
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=2)
        (request,) = self.engine.make_requests(
            list(prompt),
            params,
            request_id=f"bench-{self._calls}",
            on_delta=lambda delta: seen.extend(delta.logprobs),
        )
        self.engine.loop.add(request)
        self.finish([request])
        first, second = (logprob for _, logprob in seen[0].top)
        return first - second
