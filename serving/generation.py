"""The one core beneath every protocol: a validated call becomes engine requests and a stream of events."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..engine.errors import EngineStopped
from ..engine.prefetch_policy import PrefetchPolicy
from ..engine.request import Delta, Request, SamplingParams, TokenLogprob
from ..engine.validate import ParameterError, check_prompt, check_sampling
from .errors import ApiError, bad_request, internal_error, unavailable
from .metrics import ServingMetrics

if TYPE_CHECKING:
    from ..engine.engine import Engine

MAX_CHOICES = 1024
"""Prompts times n of one call."""

WATCH_INTERVAL = 0.5
"""Seconds between looks at the engine's health."""
MAX_HEARTBEAT_AGE = 60.0
"""Seconds without a sign of life from the engine's loop before it counts as hung."""

_T = TypeVar("_T")


class EngineRunner(Protocol):
    """What serving needs of `engine.thread.EngineThread`."""

    engine: Engine
    on_fault: Callable[[], None]

    def start(self) -> None: ...
    def close(self, drain_timeout: float = ...) -> None: ...
    def hurry(self) -> None: ...
    def call(self, work: Callable[[], _T]) -> Future[_T]: ...
    def submit(self, requests: list[Request]) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def heartbeat_age(self) -> float: ...
    @property
    def alive(self) -> bool: ...
    @property
    def ready(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call in the engine's terms. Choice `j` of prompt `p` has index `p * params.n + j`."""

    prefix: str
    """First part of the answer's id, e.g. `chatcmpl`."""
    prompts: list[list[int]]
    params: SamplingParams
    namespace: bytes = b""
    priority: int = 0
    prefetch: PrefetchPolicy | None = None
    """How long to wait for the disk; None = as the engine does."""
    warming: bool = False
    """Of the server's own making: taken before the server is ready, and left out of the latencies."""
    param: str = "prompt"
    """Field of the body that the prompts came from, for error messages."""
    echo: list[str] | None = None
    """Text to put before each prompt's answers; with `params.max_tokens` 0 there is nothing else."""
    started: float
    """When the call came in, on the service's clock."""


@dataclass(frozen=True, slots=True)
class Event:
    """What became known of one choice; the concatenation of its events is its result."""

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Choice:
    """A choice put together from its events."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: Event) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason or self.finish_reason


class Service:
    """What handlers share: the engine's thread, workers for text, metrics, and the calls in progress."""

    def __init__(
        self, thread: EngineRunner, metrics: ServingMetrics, clock: Callable[[], float], created: int
    ):
        self.thread = thread
        self.created = created
        self.metrics = metrics
        self.clock = clock
        self.draining = False
        self.warm = True
        """False while the prompts of the warm-up file are being computed."""
        self.mailbox = Mailbox()
        self._open: set[Generation] = set()
        # Tokenizing a long prompt takes whole seconds: two, so that one cannot hold up all the others.
        self._making = threading.Lock()
        tokenizer = thread.engine.tokenizer
        self._longest_token = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    @property
    def engine(self) -> Engine:
        return self.thread.engine

    @property
    def live(self) -> bool:
        """The engine's loop runs and shows it; while it warms up, running is enough."""
        beating = not self.thread.ready or self.thread.heartbeat_age() < MAX_HEARTBEAT_AGE
        return self.thread.alive and beating

    def check_ready(self, *, warming: bool = False) -> None:
        """Raises `ApiError` 503 when a call cannot be taken now; `warming`: one of the server's own."""
        if self.draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        if not self.thread.alive:
            raise _engine_stopped()
        if not self.thread.ready:
            raise unavailable("The engine is still warming up.", "not_ready")
        if not self.warm and not warming:
            raise unavailable("The cache is still being warmed.", "not_ready")

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 unless `name` is the served model or left away."""
        if name is not None and name != self.engine.model_name:
            message = f"There is no model {name[:200]!r} here; this server has {self.engine.model_name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def in_worker(self, work: Callable[..., _T], *args: Any) -> _T:
        """Runs text work in a worker thread, so that the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *args)

    async def in_engine(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in the engine's thread, between two steps. Raises `ApiError` 503 if that cannot be."""
        self.check_ready()
        try:
            return await asyncio.wrap_future(self.thread.call(work))
        except EngineStopped:
            raise _engine_stopped() from None

    def encode(self, text: str, *, add_bos: bool, param: str) -> list[int]:
        """Token ids of a text, for workers. Refuses what cannot fit (`ApiError` 400) before the work of tokenizing."""
        self.check_length(len(text) // self._longest_token, param)
        return self.engine.tokenizer.encode(text, add_bos=add_bos)

    def check_length(self, least: int, param: str) -> None:
        """Raises `ApiError` 400 when a prompt of at least so many tokens leaves no room for an answer."""
        context = self.engine.context_length
        if least > context:
            message = f"{param} has at least {least} tokens, but the context length is {context} tokens"
            raise bad_request(message, param, "context_length_exceeded")

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raises `ApiError` 400 when the ids leave no room for an answer or lie outside the vocabulary."""
        self.check_length(len(ids), param)
        vocab = self.engine.model_config.vocab_size
        for token_id in ids:
            if not 0 <= token_id < vocab:
                message = f"{param}: token id {token_id} is outside the vocabulary of {vocab}"
                raise bad_request(message[:200], param)

    def generate(self, call: Call) -> Generation:
        """The call's generation, to be used as `async with`: entering checks and submits it, leaving aborts the rest.

        Entering raises `ApiError` or `ParameterError` for what the engine cannot do.
        """
        return Generation(self, call)

    def make_requests(self, call: Call, call_id: str, on_delta: Callable[[Delta], None]) -> list[Request]:
        """The call's engine requests in the order of its choices, for workers. Raises `ParameterError`."""
        # One at a time: the engine draws seeds from one generator.
        with self._making:
            return [
                request
                for p, prompt in enumerate(call.prompts)
                for request in self.engine.make_requests(
                    prompt,
                    call.params,
                    request_id=f"{call_id}-{p}",
                    namespace=call.namespace,
                    priority=call.priority,
                    prefetch=call.prefetch,
                    on_delta=on_delta,
                )
            ]

    def submit(self, generation: Generation, requests: list[Request]) -> None:
        """Hands requests to the engine, and the generation to those who watch over it."""
        self.check_ready(warming=generation.call.warming)
        self.thread.submit(requests)
        self._open.add(generation)

    def discard(self, generation: Generation, unfinished: list[str]) -> None:
        """Forgets a generation that ended, and aborts what it leaves unfinished."""
        self._open.discard(generation)
        if unfinished:
            self.thread.abort(unfinished)

    async def drain(self, timeout: float) -> None:
        """Takes no more calls; returns when the running ones have ended, after `timeout` seconds by force."""
        self.draining = True
        deadline = self.clock() + timeout
        while self._open and self.clock() < deadline:
            await asyncio.sleep(0.02)
        self.fail_open(unavailable("The server is shutting down.", "shutting_down"))

    def fail_open(self, error: ApiError) -> None:
        """Ends every call in progress with an error."""
        for generation in list(self._open):
            generation.fail(error)

    async def watch(self) -> None:
        """Runs for ever: samples rates, and ends the calls of an engine that died, which nobody else would."""
        while True:
            self.metrics.sample()
            if not self.thread.alive:
                self.fail_open(_engine_stopped())
            await asyncio.sleep(WATCH_INTERVAL)

    def close(self) -> None:
        """Ends open calls and the workers."""
        self.fail_open(unavailable("The server is shutting down.", "shutting_down"))
        self._workers.shutdown(wait=True, cancel_futures=True)


class Mailbox:
    """Carries deltas from the engine's thread to the event loop: one wake-up for all that have piled up."""

    def __init__(self) -> None:
        self._deltas: deque[tuple[Generation, Delta]] = deque()
        self._woken = False

    def put(self, loop: asyncio.AbstractEventLoop, generation: Generation, delta: Delta) -> None:
        """Called in the engine's thread."""
        self._deltas.append((generation, delta))
        # Appended before the flag is read, and cleared before the deque is emptied: no delta is left behind.
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The event loop has closed: nobody is left to read.
                self._deltas.clear()

    def _deliver(self) -> None:
        self._woken = False
        while self._deltas:
            generation, delta = self._deltas.popleft()
            generation.deliver(delta)


class Generation:
    """The choices of one call while they come in."""

    def __init__(self, service: Service, call: Call):
        self.call = call
        self.id = f"{call.prefix}-{secrets.token_hex(12)}"
        self.num_choices = len(call.prompts) * call.params.n
        self._service = service
        self._requests: list[Request] = []
        self._index: dict[str, int] = {}
        self._unfinished: set[str] = set()
        self._last_delta: dict[str, float] = {}
        self._completion_tokens = 0
        self._pending: list[Event] = []
        self._wake = asyncio.Event()
        self._failure: ApiError | None = None

    async def __aenter__(self) -> Generation:
        call, service = self.call, self._service
        self._check()
        if call.echo is not None:
            reason = "length" if call.params.max_tokens == 0 else None
            for index in range(self.num_choices):
                text = call.echo[index // call.params.n]
                self._pending.append(Event(index, text, finish_reason=reason))
            self._wake.set()
        if call.params.max_tokens == 0:
            return self
        on_delta = partial(service.mailbox.put, asyncio.get_running_loop(), self)
        try:
            self._requests = await service.in_worker(service.make_requests, call, self.id, on_delta)
        except ParameterError as error:
            if error.param == "prompt":
                error.param = call.param
            raise
        self._index = {request.id: index for index, request in enumerate(self._requests)}
        service.submit(self, self._requests)
        self._unfinished = set(self._index)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._service.discard(self, list(self._unfinished))

    def _check(self) -> None:
        call, engine = self.call, self._service.engine
        vocab, context = engine.model_config.vocab_size, engine.context_length
        check_sampling(call.params, vocab_size=vocab, allow_no_tokens=call.echo is not None)
        if self.num_choices > MAX_CHOICES:
            count = f"{len(call.prompts)} prompts times n = {call.params.n}"
            raise bad_request(f"{count} is more than {MAX_CHOICES} choices in one call.", "n")
        if call.params.max_tokens == 0:
            for prompt in call.prompts:
                check_prompt(
                    prompt,
                    vocab_size=vocab,
                    context_length=context,
                    capacity_tokens=context,
                    params=call.params,
                )

    def deliver(self, delta: Delta) -> None:
        """Takes over what the engine reports of one request."""
        request = delta.request
        if request.id not in self._unfinished:
            return
        self._observe(delta)
        if delta.error is not None or delta.finish_reason in ("abort", "error"):
            self.fail(_engine_error(delta))
            self._unfinished.discard(request.id)
            return
        if delta.finish_reason is not None:
            self._unfinished.discard(request.id)
        self._completion_tokens += len(delta.token_ids)
        index = self._index[request.id]
        event = Event(index, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason)
        self._pending.append(event)
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends the stream of events with `error`, after those that are already here; too late once all are."""
        if self._unfinished:
            self._failure = self._failure or error
            self._wake.set()

    async def batches(self) -> AsyncIterator[list[Event]]:
        """The events in order, as many at a time as have piled up. Raises `ApiError` when the call fails."""
        while self._pending or self._unfinished or self._failure:
            await self._wake.wait()
            self._wake.clear()
            events, self._pending = self._pending, []
            if events:
                yield events
            if self._failure is not None:
                raise self._failure

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage so far. A prompt counts once, however many choices it has."""
        prompt = sum(len(prompt) for prompt in self.call.prompts)
        firsts = self._requests[:: self.call.params.n]
        by_tier = [request.cached_by_tier for request in firsts]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(sum(tiers.values()) for tiers in by_tier),
                "cached_tokens_by_tier": {
                    tier: sum(tiers[tier] for tiers in by_tier) for tier in ("device", "host", "disk")
                },
            },
        }

    def _observe(self, delta: Delta) -> None:
        service, request = self._service, delta.request
        if self.call.warming:
            return
        now = service.clock()
        if delta.token_ids:
            previous = self._last_delta.get(request.id)
            if previous is None:
                service.metrics.ttft.observe(now - self.call.started)
            else:
                service.metrics.inter_token.observe(now - previous)
            self._last_delta[request.id] = now
        if delta.finish_reason in ("stop", "length"):
            service.metrics.observe_finished(request, now - self.call.started)


def _engine_stopped() -> ApiError:
    return unavailable("The engine has stopped.", "engine_stopped")


def _engine_error(delta: Delta) -> ApiError:
    if delta.error is not None:
        return ApiError(500, delta.error, code="engine_error")
    if delta.finish_reason == "abort":
        return unavailable("The request was aborted.", "aborted")
    return internal_error()
