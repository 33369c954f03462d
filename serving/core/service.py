"""What handlers share: the way to the engine, and the calls in progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...engine.constraint import ConstraintError
from ...engine.errors import EngineStopped
from ...engine.request import Delta, Request
from ..http.errors import ApiError, bad_request, unavailable
from ..observe.metrics import ServingMetrics
from ..parsers.choose import OutputStyle
from .answer_form import AnswerForm
from .generation import Call, Generation, Mailbox

if TYPE_CHECKING:
    from ...engine.cache_control import CacheControl
    from ...engine.engine import Engine
    from ...engine.stats import EngineStats
    from ...engine.thread import EngineThread

WATCH_INTERVAL = 0.5
"""Seconds between looks at the engine's health."""
LAG_INTERVAL = 0.05
"""Seconds between looks at how late the event loop is."""
MAX_HEARTBEAT_AGE = 60.0
"""Seconds without a sign of life from the engine's loop before it counts as hung."""

_T = TypeVar("_T")


class EngineRunner(Protocol):
    """What serving needs of `engine.thread.EngineThread`, and of `engine.replicas.Replicas`, which are several as one."""

    engine: Engine
    """One of the engines, for what is the same in all."""

    def cache_control(self, pin_share: float) -> CacheControl: ...
    def start(self) -> None: ...
    def close(self, drain_timeout: float = ...) -> None: ...
    def hurry(self) -> None: ...
    def call(self, work: Callable[[], _T]) -> Future[_T]: ...
    def submit(self, requests: list[Request]) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def heartbeat_age(self) -> float: ...
    @property
    def replicas(self) -> Sequence[EngineThread]: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def alive(self) -> bool: ...
    @property
    def ready(self) -> bool: ...


class Service:
    """What handlers share: the engine's thread, workers for text, metrics, and the calls in progress."""

    def __init__(
        self,
        thread: EngineRunner,
        metrics: ServingMetrics,
        clock: Callable[[], float],
        *,
        created: int,
        output_style: OutputStyle,
        max_queued: int,
        request_timeout: float = 0.0,
    ):
        self.thread = thread
        self.created = created
        self.metrics = metrics
        self.clock = clock
        self.draining = False
        self.warm = True
        """False while the prompts of the warm-up file are being computed."""
        self.mailbox = Mailbox()
        self.on_end: Callable[[Generation], None] = lambda _: None
        """Called with every generation that was entered, when it is left."""
        self._max_queued = max_queued
        self._request_timeout = request_timeout
        self._open: set[Generation] = set()
        self._calls = 0
        self._choices = 0
        # Tokenizing a long prompt takes whole seconds: two, so that one cannot hold up all the others.
        self._making = threading.Lock()
        self.output_style = output_style
        tokenizer = thread.engine.tokenizer
        self._longest_token = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
        # A grammar may take a second: texts do not wait for it.
        self._compilers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")

    @property
    def engine(self) -> Engine:
        return self.thread.engine

    @property
    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.thread.stats

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

    @contextmanager
    def call_in_progress(self) -> Iterator[None]:
        """Counts an HTTP call, from before its body is read to the end of its answer. Raises `ApiError` 503 when there
        are too many."""
        self._check_room(self._calls)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _check_room(self, taken: int) -> None:
        if taken >= self.stats.slots + self._max_queued:
            message = f"The server has {self._max_queued} requests waiting, which is as many as it takes."
            raise unavailable(message, "queue_full")

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 unless `name` is the served model or left away."""
        if name is not None and name != self.engine.model_name:
            message = f"There is no model {name[:200]!r} here; this server has {self.engine.model_name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def in_worker(self, work: Callable[..., _T], *args: Any) -> _T:
        """Runs text work in a worker thread, so that the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *args)

    async def compile(self, form: AnswerForm) -> None:
        """Makes sure that answers can be held to a form, before any is begun. Raises `ApiError` 400 if they cannot."""
        compile = self.engine.compile_constraint
        kind, began = form.constraint.kind, self.clock()

        def work() -> None:
            try:
                compile(form.constraint)
            except ConstraintError as error:
                raise form.refusal(error, compile) from None

        try:
            await asyncio.get_running_loop().run_in_executor(self._compilers, work)
        except ApiError:
            self.metrics.constraints_refused.labels(kind).inc()
            raise
        finally:
            self.metrics.constraint_compile.observe(self.clock() - began)
        self.metrics.constrained.labels(kind).inc()

    async def in_engine(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in the engine's thread, between two steps. Raises `ApiError` 503 if that cannot be."""
        self.check_ready()
        try:
            return await asyncio.wrap_future(self.thread.call(work))
        except EngineStopped:
            raise _engine_stopped() from None

    def encode(self, text: str, *, add_bos: bool, param: str, keep: int | None = None) -> list[int]:
        """Token ids of a text, for workers. Refuses what cannot fit (`ApiError` 400) before the work of tokenizing.

        `keep`: the last so many ids are enough, see `keep_last`.
        """
        if keep is None:
            self.check_length(len(text) // self._longest_token, param)
        return self.keep_last(self.engine.tokenizer.encode(text, add_bos=add_bos), keep)

    def keep_last(self, ids: list[int], keep: int | None) -> list[int]:
        """The last `keep` ids (None: all; -1: as many as leave room for one more)."""
        if keep is None:
            return ids
        return ids[-(self.engine.context_length - 1 if keep == -1 else keep) :]

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
            if call.embeds:
                return [
                    self.engine.make_embedding(
                        prompt,
                        request_id=f"{call_id}-{p}",
                        namespace=call.namespace,
                        priority=call.priority,
                        on_delta=on_delta,
                    )
                    for p, prompt in enumerate(call.prompts)
                ]
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
        self._check_room(self._choices)
        self.thread.submit(requests)
        self._open.add(generation)
        self._choices += generation.num_choices

    def discard(self, generation: Generation, unfinished: list[str]) -> None:
        """Forgets a generation that ended, and aborts what it leaves unfinished."""
        if generation in self._open:
            self._open.remove(generation)
            self._choices -= generation.num_choices
        if unfinished:
            self.thread.abort(unfinished)
        self.on_end(generation)

    @property
    def open_calls(self) -> int:
        """Calls in progress."""
        return len(self._open)

    def abort(self, name: str | None, tenant: bytes) -> list[str]:
        """Ends the calls of a name (their `rid` or id; None: all of them) in namespaces that begin with `tenant`.

        Returns their ids.
        """
        doomed = [
            generation
            for generation in self._open
            if generation.call.namespace.startswith(tenant)
            and name in (None, generation.call.rid, generation.id)
        ]
        for generation in doomed:
            generation.cut()
        return [generation.id for generation in doomed]

    def open_requests(self) -> list[Request]:
        """The engine requests of all calls in progress."""
        return [request for generation in self._open for request in generation.requests]

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
        """Runs for ever: samples rates, ends calls that take too long, and those of an engine that died, which nobody
        else would."""
        while True:
            self.metrics.sample()
            self.metrics.tasks.set(len(asyncio.all_tasks()))
            if not self.thread.alive:
                self.fail_open(_engine_stopped())
            if self._request_timeout:
                self._end_overdue()
            await asyncio.sleep(WATCH_INTERVAL)

    async def measure_lag(self) -> None:
        """Runs for ever: observes by how much the event loop is late."""
        while True:
            due = self.clock() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.metrics.loop_lag.observe(max(self.clock() - due, 0.0))

    def _end_overdue(self) -> None:
        oldest = self.clock() - self._request_timeout
        for generation in list(self._open):
            if generation.call.started < oldest and not generation.call.warming:
                message = f"The call took more than the {self._request_timeout:g} seconds that it may."
                generation.fail(ApiError(504, message, code="timeout"))

    def close(self) -> None:
        """Ends open calls and the workers."""
        self.fail_open(unavailable("The server is shutting down.", "shutting_down"))
        for pool in (self._workers, self._compilers):
            pool.shutdown(wait=True, cancel_futures=True)


def _engine_stopped() -> ApiError:
    return unavailable("The engine has stopped.", "engine_stopped")
