"""The one core beneath every protocol: a validated call becomes engine requests and a stream of events."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ...engine.prefetch_policy import PrefetchPolicy
from ...engine.reading import PromptScores
from ...engine.request import Delta, Request, SamplingParams, TokenLogprob
from ...engine.validate import ParameterError, check_prompt, check_sampling
from ..http.errors import ApiError, bad_request, internal_error, unavailable
from .answer_form import AnswerForm

if TYPE_CHECKING:
    from .service import Service

MAX_UNREAD = 16_384
"""Events of one call that may pile up because its client does not read them."""
MAX_CHOICES = 1024
"""Prompts times n of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call in the engine's terms. Choice `j` of prompt `p` has index `p * params.n + j`."""

    prefix: str
    """First part of the answer's id, e.g. `chatcmpl`."""
    prompts: list[list[int]]
    params: SamplingParams
    form: AnswerForm | None = None
    """What each answer must match; becomes `params.constraint` once it is known that it can be enforced."""
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
    embeds: bool = False
    """Embeddings are wanted of the prompts, and nothing else."""
    rid: str | None = None
    """The caller's own name for this call, by which it can be aborted."""
    started: float
    """When the call came in, on the service's clock."""

    @property
    def computes(self) -> bool:
        """Whether the engine has anything to do."""
        return self.embeds or self.params.max_tokens > 0 or self.params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class Event:
    """What became known of one choice; the concatenation of its events is its result."""

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of the prompt's tokens from `prompt_logprobs_start` on; comes once, with the echo if there is one, before all else."""


@dataclass(slots=True)
class Choice:
    """A choice put together from its events."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None

    def add(self, event: Event) -> None:
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.text += event.text
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason or self.finish_reason


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
        self._told_prompts: set[int] = set()
        self._cut = False
        self._last_delta: dict[str, float] = {}
        self._completion_tokens = 0
        self._pending: list[Event] = []
        self._wake = asyncio.Event()
        self._failure: ApiError | None = None

    async def __aenter__(self) -> Generation:
        call, service = self.call, self._service
        if call.form is not None:
            await service.compile(call.form)
            call.params.constraint = call.form.constraint
        self._check()
        if call.echo is not None and call.params.prompt_logprobs is None:
            reason = None if call.computes else "length"
            self._pending += [Event(i, self._echo(i), finish_reason=reason) for i in range(self.num_choices)]
            self._wake.set()
        if not call.computes:
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
        check_sampling(call.params, vocab_size=vocab, allow_no_tokens=call.echo is not None or call.embeds)
        if self.num_choices > MAX_CHOICES and not call.embeds:
            count = f"{len(call.prompts)} prompts times n = {call.params.n}"
            raise bad_request(f"{count} is more than {MAX_CHOICES} choices in one call.", "n")
        if not call.computes:
            for prompt in call.prompts:
                check_prompt(
                    prompt,
                    vocab_size=vocab,
                    context_length=context,
                    capacity_tokens=context,
                    params=call.params,
                )

    @property
    def requests(self) -> list[Request]:
        """What the engine was asked for, in the order of the choices."""
        return self._requests

    @property
    def failure(self) -> ApiError | None:
        """What ended the stream of events before its time."""
        return self._failure

    def deliver(self, delta: Delta) -> None:
        """Takes over what the engine reports of one request."""
        request = delta.request
        if delta.finish_reason is not None:
            # It says no more, and no longer holds who held it: both can go at once, not when the collector comes by.
            request.on_delta = None
        if request.id not in self._unfinished:
            return
        self._observe(delta)
        aborted = delta.finish_reason == "abort" and not self._cut
        if delta.error is not None or aborted or delta.finish_reason == "error":
            self.fail(_engine_error(delta))
            self._unfinished.discard(request.id)
            return
        if delta.finish_reason is not None:
            self._unfinished.discard(request.id)
        self._completion_tokens += len(delta.token_ids)
        index = self._index[request.id]
        self._tell_prompt(index, request)
        event = Event(index, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason)
        self._pending.append(event)
        self._wake.set()
        if len(self._pending) > MAX_UNREAD:
            self._drop_reader()

    def _drop_reader(self) -> None:
        self.fail(ApiError(408, "The client does not read what it asked for.", code="client_too_slow"))
        self._service.thread.abort(list(self._unfinished))
        self._unfinished.clear()

    def _tell_prompt(self, index: int, request: Request) -> None:
        """Before the first event of a choice, what was wanted of its prompt."""
        reading = request.reading
        if (
            not isinstance(reading, PromptScores)
            or index in self._told_prompts
            or reading.done < reading.total
        ):
            return
        self._told_prompts.add(index)
        self._pending.append(Event(index, self._echo(index), prompt_logprobs=reading.logprobs))

    def _echo(self, index: int) -> str:
        echo = self.call.echo
        return "" if echo is None else echo[index // self.call.params.n]

    def cut(self) -> None:
        """Ends every choice where it is, with the finish reason `abort`."""
        self._cut = True
        self._service.thread.abort(list(self._unfinished))

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


def _engine_error(delta: Delta) -> ApiError:
    if delta.error is not None:
        return ApiError(500, delta.error, code="engine_error")
    if delta.finish_reason == "abort":
        return unavailable("The request was aborted.", "aborted")
    return internal_error()
