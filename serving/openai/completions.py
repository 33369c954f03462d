"""`/v1/completions`: a thin translation between OpenAI's completions bodies and the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from ...engine.request import SamplingParams
from ..core.answer_form import answer_form
from ..core.generation import Call, Choice, Event, Generation
from ..core.keys import NOW, SERVICE
from ..core.service import Service
from ..http.auth import namespace_of, priority_of
from ..http.body import read_as
from ..http.streaming import respond_stream, respond_whole
from ..openapi.document import Documented
from .answers import CompletionAnswer
from .bodies import CompletionBody, decode_completion, prefetch_policy, prompts_of, sampling_params
from .logprobs import CompletionLogprobs, prompt_entries

if TYPE_CHECKING:
    from ...engine.engine import Engine

DEFAULT_MAX_TOKENS = 16

_T = TypeVar("_T")


@Documented(body=CompletionBody, answer=CompletionAnswer, events=CompletionAnswer)
async def completions(request: web.Request) -> web.StreamResponse:
    """Continues texts or token ids."""
    service = request.app[SERVICE]
    started = service.clock()
    service.check_ready()
    body = await read_as(request, decode_completion)
    service.check_model(body.model)
    (prompts, echo), answers = await service.in_worker(
        lambda: (encode_prompts(service, body), answer_form(body))
    )
    call = Call(
        prefix="cmpl",
        prompts=prompts,
        params=_params(body),
        form=answers,
        namespace=namespace_of(request, body.cache_salt),
        prefetch=prefetch_policy(body),
        priority=priority_of(request, body.priority),
        echo=echo,
        started=started,
    )
    form = CompletionForm(service.engine, body, call, created=int(request.app[NOW]()))
    async with service.generate(call) as generation:
        if body.stream:
            return await respond_stream(request, generation, form, body.stream_options)
        return await respond_whole(generation, form)


def encode_prompts(service: Service, body: CompletionBody) -> tuple[list[list[int]], list[str] | None]:
    """Token ids of each prompt and, for `echo`, their texts. Raises `ApiError` 400."""
    given, keep = prompts_of(body.prompt), body.truncate_prompt_tokens
    prompts = encode_all(
        service, given, "prompt", keep=keep, add_special=body.add_special_tokens is not False
    )
    if not body.echo:
        return prompts, None
    decode = service.engine.tokenizer.decode
    texts = [
        prompt if isinstance(prompt, str) and keep is None else decode(ids)
        for prompt, ids in zip(given, prompts, strict=True)
    ]
    return prompts, texts


def encode_all(
    service: Service, prompts: list[str | list[int]], param: str, *, keep: int | None, add_special: bool
) -> list[list[int]]:
    """Token ids of texts, and checked ids as they are. Raises `ApiError` 400."""
    add_bos = service.engine.tokenizer.add_bos and add_special

    def encode(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return service.encode(prompt, add_bos=add_bos, param=param, keep=keep)
        ids = service.keep_last(prompt, keep)
        service.check_ids(ids, param)
        return ids

    return [encode(prompt) for prompt in prompts]


def _params(body: CompletionBody) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        params.prompt_logprobs = max(params.prompt_logprobs or 0, body.logprobs)
    if body.best_of is not None and body.best_of > params.n:
        # The best are those whose tokens are the likeliest.
        params.n, params.logprobs = body.best_of, params.logprobs or 0
    return params


class CompletionForm:
    """Completions' shape of answers and chunks."""

    def __init__(self, engine: Engine, body: CompletionBody, call: Call, created: int):
        self._engine = engine
        self._call = call
        self._created = created
        self._top = body.logprobs
        self._prompt_top = body.prompt_logprobs
        self._n = body.n or 1
        self._token_ids = bool(body.return_token_ids)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._opened: set[int] = set()

    def answer(self, generation: Generation, choices: list[Choice]) -> dict[str, Any]:
        told = [self._choice(choice) for choice in self._best(choices)]
        return self.chunk(generation, told) | {"usage": generation.usage()}

    def chunk(self, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": generation.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._engine.model_name,
            "choices": choices,
        }

    def choices(self, generation: Generation, event: Event) -> list[dict[str, Any]]:
        shows = event.text or event.finish_reason or event.logprobs or event.prompt_logprobs is not None
        return [self._choice(event)] if shows or (self._token_ids and event.token_ids) else []

    def _best(self, choices: list[Choice]) -> list[Choice]:
        """The `n` choices of each prompt whose tokens are the likeliest, on average; all, unless more were made."""
        made = self._call.params.n
        if made == self._n:
            return choices
        best = [
            choice
            for first in range(0, len(choices), made)
            for choice in sorted(choices[first : first + made], key=_mean_logprob, reverse=True)[: self._n]
        ]
        return [replace(choice, index=index) for index, choice in enumerate(best)]

    def _prompt_of(self, index: int, of: Sequence[_T]) -> _T:
        return of[index // self._n]

    def _choice(self, part: Choice | Event) -> dict[str, Any]:
        told: dict[str, Any] = {
            "index": part.index,
            "text": part.text,
            "logprobs": self._block(part),
            "finish_reason": part.finish_reason,
        }
        if self._token_ids:
            if part.index not in self._opened:
                self._opened.add(part.index)
                told["prompt_token_ids"] = self._prompt_of(part.index, self._call.prompts)
            told["token_ids"] = part.token_ids
        if self._prompt_top is not None and part.prompt_logprobs is not None:
            tokenizer = self._engine.tokenizer
            told["prompt_logprobs"] = prompt_entries(tokenizer, part.prompt_logprobs, self._prompt_top)
        return told

    def _block(self, part: Choice | Event) -> dict[str, Any] | None:
        if self._top is None:
            return None
        if part.index not in self._logprobs:
            self._logprobs[part.index] = CompletionLogprobs(
                self._engine.tokenizer, self._top, skip_special_tokens=self._call.params.skip_special_tokens
            )
        blocks = self._logprobs[part.index]
        if self._call.echo is None or part.prompt_logprobs is None:
            return blocks.add(part.logprobs)
        prompt = self._prompt_of(part.index, self._call.prompts)
        text = self._prompt_of(part.index, self._call.echo)
        echoed = blocks.add_echo(prompt, part.prompt_logprobs, text)
        rest = blocks.add(part.logprobs)
        return {name: echoed[name] + rest[name] for name in echoed}


def _mean_logprob(choice: Choice) -> float:
    values = [position.logprob for position in choice.logprobs]
    return sum(values) / len(values) if values else 0.0
