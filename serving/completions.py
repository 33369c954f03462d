"""`/v1/completions`: a thin translation between OpenAI's completions bodies and the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from .auth import namespace_of
from .body import read_body
from .errors import bad_request
from .generation import Call, Choice, Event, Generation, Service
from .keys import CONFIG, NOW, SERVICE
from .logprobs import CompletionLogprobs
from .protocol import CompletionBody, decode_completion, prefetch_policy, prompts_of, sampling_params
from .streaming import respond_stream, respond_whole

if TYPE_CHECKING:
    from ..engine.engine import Engine

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """Continues texts or token ids."""
    service = request.app[SERVICE]
    started = service.clock()
    service.check_ready()
    body = decode_completion(await read_body(request, request.app[CONFIG].max_body_size))
    service.check_model(body.model)
    prompts, echo = await service.in_worker(encode_prompts, service, body)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    call = Call(
        prefix="cmpl",
        prompts=prompts,
        params=sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs),
        namespace=namespace_of(request, body.cache_salt),
        prefetch=prefetch_policy(body),
        priority=body.priority or 0,
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
    tokenizer = service.engine.tokenizer
    prompts: list[list[int]] = []
    texts: list[str] = []
    for prompt in prompts_of(body):
        if not prompt:
            raise bad_request("prompt must not be empty.", "prompt")
        if isinstance(prompt, str):
            prompts.append(service.encode(prompt, add_bos=tokenizer.add_bos, param="prompt"))
        else:
            service.check_ids(prompt, "prompt")
            prompts.append(prompt)
        if body.echo:
            texts.append(prompt if isinstance(prompt, str) else tokenizer.decode(prompt))
    return prompts, texts if body.echo else None


class CompletionForm:
    """Completions' shape of answers and chunks."""

    def __init__(self, engine: Engine, body: CompletionBody, call: Call, created: int):
        self._engine = engine
        self._call = call
        self._created = created
        self._top = body.logprobs
        self._token_ids = bool(body.return_token_ids)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._opened: set[int] = set()

    def answer(self, generation: Generation, choices: list[Choice]) -> dict[str, Any]:
        told = [self._choice(choice) for choice in choices]
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
        silent = not event.logprobs and not (self._token_ids and event.token_ids)
        return [] if silent and not event.text and not event.finish_reason else [self._choice(event)]

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
                told["prompt_token_ids"] = self._call.prompts[part.index // self._call.params.n]
            told["token_ids"] = part.token_ids
        return told

    def _block(self, part: Choice | Event) -> dict[str, Any] | None:
        if self._top is None:
            return None
        if part.index not in self._logprobs:
            self._logprobs[part.index] = CompletionLogprobs(
                self._engine.tokenizer, self._top, skip_special_tokens=self._call.params.skip_special_tokens
            )
        return self._logprobs[part.index].add(part.logprobs)
