"""An engine that says what a script tells it, from a thread of its own: for server tests without a model.

It has the faces of `Engine` and `EngineThread` that serving uses, checks parameters as the engine does, and makes its
text through the real `IncrementalText`.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from helpers.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer
from tierax.cache.manager import CacheManager
from tierax.engine.cache_control import CacheControl
from tierax.engine.chat_template import ChatTemplate
from tierax.engine.config import EngineConfig
from tierax.engine.constraint import Constraint, Matcher
from tierax.engine.errors import EngineStopped
from tierax.engine.grammar import Compiled, GrammarCompiler
from tierax.engine.prefetch_policy import PrefetchPolicy
from tierax.engine.reading import HiddenSum, MeanHidden, PromptScores
from tierax.engine.request import Delta, Request, SamplingParams, Status, TokenLogprob
from tierax.engine.stats import EngineStats
from tierax.engine.text import IncrementalText
from tierax.engine.validate import check_prompt, check_sampling, seed_for_choice

_TIDY = b'}]"0{[:otfn42<\n/'
"""What brings a constrained text to its end, in this order."""

Script = Callable[[Request, int], Iterable[int]]
"""(request, its choice's index) -> the tokens that it "samples"."""


def say(text: str) -> Script:
    """Every choice says `text`, a byte per token, then ends."""
    return lambda request, index: [*text.encode(), EOS]


def babble(request: Request, index: int) -> Iterator[int]:
    """Letters for ever; which ones follows from the request's seed."""
    state = request.seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield ord("a") + (state >> 33) % 26


def _allowed(matcher: Matcher | None, wanted: int) -> int:
    """The token that is wanted or, where the constraint forbids it, one that brings the text to its end."""
    if matcher is None:
        return wanted
    allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    free = allowed[ord("q")]  # within a JSON string
    ways = [wanted, EOS, *(b'"' if free else b""), *_TIDY, *np.flatnonzero(allowed).tolist()]
    return next(token for token in ways if allowed[token])


class FakeEngine:
    """Stands for `Engine`. A prompt that was seen before in its namespace counts as cached but for its last token."""

    def __init__(
        self,
        script: Script = babble,
        *,
        context_length: int = 4096,
        add_bos: bool = False,
        template: bool | str = True,
        more_specials: tuple[str, ...] = (),
    ) -> None:
        self.script = script
        self.context_length = context_length
        self.model_name = "fake"
        self.tokenizer = byte_tokenizer(add_bos=add_bos, more_specials=more_specials)
        self.end_ids = self.tokenizer.eos_ids
        source = template if isinstance(template, str) else self.tokenizer.chat_template
        self.chat_template = ChatTemplate(source, "<|bos|>", "<|eos|>") if template and source else None
        self.model_config = SimpleNamespace(
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=VOCAB_SIZE,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
        )
        self.dtype = self.activations = self.kv_dtype = "f32"
        self.stats = EngineStats(pages_free=64, pages_total=64)
        self.config = EngineConfig(model_path="fake")
        # Nothing is ever in it: what was seen is only pretended to be cached.
        self.cache = CacheManager(64, 16)
        self.page_bytes = 1000
        self.tiers = None
        self.seen: set[tuple[bytes, tuple[int, ...]]] = set()
        self.made: list[Request] = []
        self._grammars = GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size, self.end_ids)

    def compile_constraint(self, constraint: Constraint) -> Compiled:
        return self._grammars.compile(constraint)

    def make_requests(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        namespace: bytes = b"",
        priority: int = 0,
        prefetch: PrefetchPolicy | None = None,
        on_delta: Callable[[Delta], None],
    ) -> list[Request]:
        check_sampling(params, vocab_size=self.tokenizer.vocab_size)
        limit = check_prompt(
            prompt_ids,
            vocab_size=self.tokenizer.vocab_size,
            context_length=self.context_length,
            capacity_tokens=2 * self.context_length,
            params=params,
        )
        ends = frozenset() if params.ignore_eos else self.tokenizer.eos_ids
        seed = len(self.made) if params.seed is None else params.seed
        compiled = None if params.constraint is None else self.compile_constraint(params.constraint)
        stop_ids = ends | frozenset(params.stop_token_ids)
        requests = [
            Request(
                id=f"{request_id}-{index}",
                tokens=array("i", prompt_ids),
                num_prompt=len(prompt_ids),
                params=params,
                seed=seed_for_choice(seed, index),
                stop_ids=stop_ids,
                matcher=None if compiled is None else compiled.matcher(stop_ids),
                max_total=limit,
                namespace=namespace,
                priority=priority,
                prefetch=prefetch,
                text=IncrementalText.of(self.tokenizer, params),
                reading=(
                    None
                    if params.prompt_logprobs is None
                    else PromptScores(
                        len(prompt_ids) - 1, params.prompt_logprobs, params.prompt_logprobs_start
                    )
                ),
                on_delta=on_delta,
            )
            for index in range(params.n)
        ]
        self.made += requests
        return requests

    def make_embedding(
        self,
        prompt_ids: list[int],
        *,
        request_id: str,
        namespace: bytes = b"",
        priority: int = 0,
        on_delta: Callable[[Delta], None],
    ) -> Request:
        params = SamplingParams(max_tokens=0)
        limits = {"vocab_size": self.tokenizer.vocab_size, "context_length": self.context_length}
        check_prompt(
            prompt_ids, capacity_tokens=2 * self.context_length, params=params, param="input", **limits
        )
        request = Request(
            id=request_id,
            tokens=array("i", prompt_ids),
            num_prompt=len(prompt_ids),
            params=params,
            seed=0,
            stop_ids=frozenset(),
            max_total=len(prompt_ids),
            namespace=namespace,
            priority=priority,
            reading=MeanHidden(len(prompt_ids)),
            on_delta=on_delta,
        )
        self.made.append(request)
        return request


class FakeEngineThread:
    """Stands for `EngineThread`: each step gives one token to each running request, the first step none.

    Tests may change `step_seconds`, `max_running` and `is_ready`, `hold` the loop between steps, and `kill` it.
    """

    def __init__(self, engine: FakeEngine, *, step_seconds: float = 0.0, max_running: int = 64) -> None:
        self.engine: Any = engine
        self.step_seconds = step_seconds
        self.max_running = max_running
        engine.stats.slots = max_running
        self.is_ready = True
        self.fault: str | None = None
        self.drain_timeout: float | None = None
        """What `close` was given."""
        self.hurried = False
        self.waiting: list[Request] = []
        self.running: dict[str, tuple[Request, Iterator[int]]] = {}
        self._aborted: set[str] = set()
        self._changed = threading.Condition()
        self._going = threading.Event()
        self._going.set()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    @property
    def replicas(self) -> list[Any]:
        return [self]

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def cache_control(self, pin_share: float) -> CacheControl:
        return CacheControl(self.engine, pin_share)

    def start(self) -> None:
        self._thread.start()

    def close(self, drain_timeout: float = 10.0) -> None:
        self.drain_timeout = drain_timeout
        self.kill()

    def hurry(self) -> None:
        self.hurried = True

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.alive:
            future.set_exception(EngineStopped())
            return future
        with self._changed:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        return future

    def kill(self) -> None:
        """Ends the loop without a word to anybody."""
        self.resume()
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join()

    def hold(self) -> None:
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    def submit(self, requests: list[Request]) -> None:
        with self._changed:
            for request in requests:
                request.arrival = time.monotonic()
            self.waiting += requests
            self._count()
            self._changed.notify()

    def abort(self, request_ids: list[str]) -> None:
        with self._changed:
            self._aborted |= set(request_ids)
            self._changed.notify()

    def heartbeat_age(self) -> float:
        return 0.0

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        return self.is_ready

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or self._aborted or self.waiting or self.running)
                if self._stop:
                    return
                self._take_aborts()
                fresh = self._admit()
                step = [pair for pair in self.running.values() if pair[0] not in fresh]
            time.sleep(self.step_seconds)
            self._going.wait()
            for request, tokens in step:
                if self.fault is not None:
                    self._end(request, [], "", [], "error", self.fault)
                else:
                    self._advance(request, _allowed(request.matcher, next(tokens, EOS)))
            self.engine.stats.steps += 1
            self._count()

    def _take_aborts(self) -> None:
        doomed = [r for r in self.waiting if r.id in self._aborted]
        doomed += [r for r, _ in self.running.values() if r.id in self._aborted]
        self._aborted.clear()
        self.waiting = [r for r in self.waiting if r not in doomed]
        for request in doomed:
            self._end(request, [], "", [], "abort")

    def _admit(self) -> list[Request]:
        fresh = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.pop(0)
            request.status = Status.RUNNING
            request.first_scheduled = time.monotonic()
            key = (request.namespace, tuple(request.tokens))
            stats = self.engine.stats
            stats.prompt_tokens += request.num_prompt
            if key in self.engine.seen:
                request.cached_tokens = request.num_prompt - 1
                stats.cached_tokens += request.cached_tokens
            self.engine.seen.add(key)
            script = self.engine.script(request, int(request.id.rsplit("-", 1)[1]))
            self.running[request.id] = (request, iter(script))
            fresh.append(request)
        return fresh

    def _read(self, request: Request) -> None:
        """Makes up what is wanted of the prompt: token t has the log-prob -t/100, and is the third likeliest."""
        reading, prompt = request.reading, request.tokens[: request.num_prompt]
        if isinstance(reading, MeanHidden):
            counts = np.bincount(prompt, minlength=VOCAB_SIZE).astype(np.float64)
            reading.add(HiddenSum(len(prompt), counts))
        elif reading is not None:
            top = tuple((token, -0.1 * token) for token in range(reading.top))
            reading.add([TokenLogprob(token, -token / 100, top, 3) for token in prompt[reading.start :]])

    def _advance(self, request: Request, token: int) -> None:
        if request.num_output == 0:
            self._read(request)
        if not request.generates:
            self._end(request, [], "", [], "length")
            return
        assert request.text is not None
        if request.first_token is None:
            request.first_token = time.monotonic()
        self.engine.stats.generated_tokens += 1
        request.tokens.append(token)
        params = request.params
        if token in request.stop_ids and request.num_output >= params.min_tokens:
            told = [TokenLogprob(token, -0.25, ())] if request.reading is not None else []
            self._end(request, [token], request.text.flush(), told, "stop")
            return
        text, stopped = request.text.append(token)
        if request.matcher is not None:
            request.matcher.advance(token)
            if request.matcher.ended and not stopped:
                text, stopped = text + request.text.flush(), True
        logprobs = []
        if params.logprobs is not None:
            top = [(token, -0.25)] + [((token + i) % VOCAB_SIZE, -2.0 - i) for i in range(1, params.logprobs)]
            logprobs = [TokenLogprob(token, -0.25, tuple(top[: params.logprobs]))]
        if stopped:
            self._end(request, [token], text, logprobs, "stop")
        elif len(request.tokens) >= request.max_total:
            self._end(request, [token], text + request.text.flush(), logprobs, "length")
        else:
            self._tell(Delta(request, [token], text, logprobs))

    def _end(
        self,
        request: Request,
        tokens: list[int],
        text: str,
        logprobs: list[TokenLogprob],
        reason: str,
        error: str | None = None,
    ) -> None:
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.finished_at = time.monotonic()
        self.running.pop(request.id, None)
        finished = self.engine.stats.finished
        finished[reason] = finished.get(reason, 0) + 1
        self._tell(Delta(request, tokens, text, logprobs, reason, error))

    def _tell(self, delta: Delta) -> None:
        assert delta.request.on_delta is not None
        delta.request.on_delta(delta)

    def _count(self) -> None:
        stats = self.engine.stats
        stats.waiting, stats.running = len(self.waiting), len(self.running)
        stats.pages_in_use = stats.running
        stats.pages_free = stats.pages_total - stats.running
