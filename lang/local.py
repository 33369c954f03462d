"""A model in this process: programs without a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .backend import Backend, Completion, Scores
from .errors import BackendError
from .expr import Sampling, Shape

if TYPE_CHECKING:
    from ..engine.config import EngineConfig
    from ..engine.constraint import Constraint
    from ..engine.request import Delta, Request, SamplingParams

PATIENCE = 1.0
"""Seconds between two looks at whether the engine still runs, while nothing comes."""


class Engine(Backend):
    """A model in this process: `Engine("demo")`, with the keywords of `LLM`. Programs share its batches and its cache."""

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Loads the model and compiles its programs. Raises `ConfigError`, `ModelError` or `TokenizerError` for what
        cannot be used."""
        from ..engine.config import EngineConfig
        from ..engine.replicas import load_thread

        config = (
            model if isinstance(model, EngineConfig) else EngineConfig.create(os.fspath(model), **options)
        )
        thread = load_thread(config)
        try:
            thread.start()
            thread.wait_ready()
        except BaseException:
            thread.close(0.0)
            raise
        super().__init__()
        self._engine, self._thread = thread.engine, thread
        self._variables = dict(chat_template_kwargs or {})
        self._calls = 0

        async def close() -> None:
            thread.close()

        self.loop.last = close

    async def encode(self, text: str, *, begins: bool) -> list[int]:
        tokenizer = self._engine.tokenizer
        try:
            return tokenizer.encode(text, add_bos=begins and tokenizer.add_bos)
        except ValueError as error:
            raise BackendError(str(error)) from None

    async def render(self, messages: Sequence[Mapping[str, str]], *, answer: bool) -> str:
        from ..engine.chat_template import TemplateError

        template = self._engine.chat_template
        if template is None:
            raise BackendError("this model has no chat template")
        try:
            return template.render(messages, add_generation_prompt=answer, **self._variables)
        except TemplateError as error:
            raise BackendError(str(error)) from None

    async def complete(
        self, ids: list[int], sampling: Sampling, shape: Shape | None, on_text: Callable[[str], None]
    ) -> Completion:
        from ..engine.request import SamplingParams

        params = SamplingParams(**{**sampling.given(), "max_tokens": sampling.max_tokens})
        if shape is not None:
            params.constraint = await asyncio.to_thread(self._constraint, shape)
        started, first = self._engine.clock(), None
        text, token_ids, logprobs = "", [], []
        [request], deltas = self._submit([ids], params)
        async for delta in deltas:
            first = self._engine.clock() if first is None else first
            token_ids += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs]
            text += delta.text
            if delta.text:
                on_text(delta.text)
        stopped = request.finish_reason == "stop"
        ended = stopped and not request.stop_ids.isdisjoint(token_ids[-1:])
        return Completion(
            text,
            token_ids[:-1] if ended else token_ids,
            request.finish_reason or "error",
            request.num_prompt,
            len(token_ids),
            request.cached_tokens,
            request.cached_by_tier,
            None if first is None else first - started,
            None if sampling.logprobs is None else logprobs,
            cut_by_stop=stopped and not ended and bool(sampling.stop),
        )

    async def score(self, prompts: list[list[int]], start: int) -> Scores:
        from ..engine.request import SamplingParams

        params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
        requests, deltas = self._submit(prompts, params)
        async for _ in deltas:
            pass
        return Scores(
            [_logprobs(request) for request in requests],
            sum(request.num_prompt for request in requests),
            sum(request.cached_tokens for request in requests),
        )

    def _constraint(self, shape: Shape) -> Constraint:
        """The shape as a constraint that is compiled. Raises `BackendError`."""
        from ..engine.constraint import Constraint, ConstraintError

        make: dict[str, Callable[[str], Constraint]] = {
            "regex": Constraint.regex,
            "json_schema": Constraint.json_schema,
            "grammar": Constraint.grammar,
        }
        try:
            constraint = make[shape.kind](shape.value)
            self._engine.compile_constraint(constraint)
        except ConstraintError as error:
            raise BackendError(str(error)) from None
        return constraint

    def _submit(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> tuple[list[Request], AsyncIterator[Delta]]:
        """Requests, one for each prompt, and what becomes of them until all have ended. Raises `BackendError`."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Delta] = asyncio.Queue()

        def tell(delta: Delta) -> None:
            loop.call_soon_threadsafe(news.put_nowait, delta)

        requests: list[Request] = []
        try:
            for ids in prompts:
                self._calls += 1
                requests += self._engine.make_requests(
                    ids, params, request_id=f"lang-{self._calls}", continues=True, on_delta=tell
                )
        except ValueError as error:
            raise BackendError(str(error)) from None
        return requests, self._deltas(requests, news)

    async def _deltas(self, requests: list[Request], news: asyncio.Queue[Delta]) -> AsyncIterator[Delta]:
        self._thread.submit(requests)
        left = {request.id for request in requests}
        try:
            while left:
                delta = await self._next(news)
                if delta.error is not None:
                    raise BackendError(delta.error)
                if delta.finish_reason is not None:
                    left.discard(delta.request.id)
                yield delta
        finally:
            self._thread.abort(list(left))

    async def _next(self, news: asyncio.Queue[Delta]) -> Delta:
        while True:
            try:
                return await asyncio.wait_for(news.get(), PATIENCE)
            except TimeoutError:
                if not self._thread.alive:
                    raise BackendError("the engine has stopped") from None


def _logprobs(request: Request) -> list[float]:
    from ..engine.reading import PromptScores

    assert isinstance(request.reading, PromptScores)
    return [entry.logprob for entry in request.reading.logprobs]
