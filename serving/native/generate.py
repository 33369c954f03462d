"""`/generate`: SGLang's native form of generation, over the same core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NotRequired, TypedDict

import msgspec
from aiohttp import web

from ...engine.request import SamplingParams, TokenLogprob
from ...engine.tokenizer import Tokenizer
from ...engine.validate import MAX_INT32
from ..core.answer_form import SchemaText, answer_form
from ..core.generation import Call, Choice, Event, Generation
from ..core.keys import SERVICE
from ..core.service import Service
from ..http.auth import namespace_of, priority_of
from ..http.body import read_as
from ..http.errors import bad_request
from ..http.streaming import respond_stream, respond_whole
from ..openai.bodies import MAX_TOP_LOGPROBS, check_priority, check_salt, decode, prompts_of, sampling_params
from ..openai.completions import encode_all
from ..openai.logprobs import finite, token_text
from ..openapi.document import Documented


class NativeSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` of a `/generate` body."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: int | None = None

    regex: str | None = None
    ebnf: str | None = None
    json_schema: SchemaText | None = None
    structural_tag: dict[str, Any] | str | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """Body of `/generate`: a text or several, or token ids or several lists of them."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling = msgspec.field(default_factory=NativeSampling)
    return_logprob: bool = False
    logprob_start_len: int = -1
    """Prompt tokens from here on get log-probs too; -1: none of them. Those before may come out of the cache."""
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | None = None
    """The caller's own name for this call, for `/abort_request`."""
    priority: int | None = None
    cache_salt: str | None = None

    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    token_ids_logprob: Any = None


class MetaInfo(TypedDict):
    """How an answer came about. Log-probs are `[log-prob, id, text]`, where the text is null unless asked for."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]
    e2e_latency: float
    input_token_logprobs: NotRequired[list[Any]]
    input_top_logprobs: NotRequired[list[Any]]
    output_token_logprobs: NotRequired[list[Any]]
    output_top_logprobs: NotRequired[list[Any]]


class Generated(TypedDict):
    """One answer. In a stream each event has all that is known so far; `index` says of which answer, if of several."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: NotRequired[int]


@Documented(body=GenerateBody, answer=Generated | list[Generated], events=Generated)
async def generate(request: web.Request) -> web.StreamResponse:
    """Continues texts or token ids. Several prompts, or `n` above 1, give a list."""
    service = request.app[SERVICE]
    started = service.clock()
    service.check_ready()
    body = await read_as(request, partial(decode, kind=GenerateBody))
    _check(body)
    (prompts, many), answers = await service.in_worker(
        lambda: (_encode(service, body), answer_form(body.sampling_params, "sampling_params."))
    )
    params = _params(body)
    call = Call(
        prefix="gen",
        prompts=prompts,
        params=params,
        form=answers,
        namespace=namespace_of(request, body.cache_salt),
        priority=priority_of(request, body.priority),
        rid=body.rid,
        param="text" if body.text is not None else "input_ids",
        started=started,
    )
    form = NativeForm(service.engine.tokenizer, body, service.clock, listed=many or params.n > 1)
    async with service.generate(call) as generation:
        if body.stream:
            return await respond_stream(request, generation, form, None)
        return await respond_whole(generation, form)


def _check(body: GenerateBody) -> None:
    for part, where in ((body, ""), (body.sampling_params, "sampling_params.")):
        for name in _UNSUPPORTED & set(part.__struct_fields__):
            if getattr(part, name) not in (None, False, "", [], {}):
                name = where + name
                raise bad_request(f"{name} is not supported by this server.", name, "unsupported_parameter")
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("Give either text or input_ids.", "text" if body.text is None else "input_ids")
    if body.logprob_start_len < -1:
        raise bad_request("logprob_start_len must be at least -1.", "logprob_start_len")
    if not 0 <= body.top_logprobs_num <= MAX_TOP_LOGPROBS:
        raise bad_request(f"top_logprobs_num must be from 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs_num")
    check_salt(body.cache_salt)
    check_priority(body.priority)


_UNSUPPORTED = frozenset(
    (
        *("input_embeds", "image_data", "video_data", "audio_data", "lora_path", "session_params"),
        *("custom_logit_processor", "return_hidden_states", "token_ids_logprob"),
    )
)


def _encode(service: Service, body: GenerateBody) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether they came as a list. Raises `ApiError` 400."""
    field = "input_ids" if body.text is None else "text"
    given: Any = body.input_ids if body.text is None else body.text
    many = isinstance(given, list) and not all(isinstance(part, int) for part in given)
    prompts = prompts_of(given, field)
    return encode_all(service, prompts, field, keep=None, add_special=True), many


def _params(body: GenerateBody) -> SamplingParams:
    asked = body.sampling_params
    most = SamplingParams().max_tokens if asked.max_new_tokens is None else asked.max_new_tokens
    top = body.top_logprobs_num if body.return_logprob else None
    params = sampling_params(asked, max_tokens=most, logprobs=top)
    params.min_tokens = asked.min_new_tokens or 0
    params.seed = asked.sampling_seed
    params.include_stop_str_in_output = bool(asked.no_stop_trim)
    if body.return_logprob and body.logprob_start_len >= 0:
        params.prompt_logprobs = top
        params.prompt_logprobs_start = min(max(1, body.logprob_start_len), MAX_INT32)
    return params


class NativeForm:
    """The native shape of answers; a stream's events hold all that is known so far."""

    def __init__(self, tokenizer: Tokenizer, body: GenerateBody, clock: Callable[[], float], *, listed: bool):
        self._tokenizer = tokenizer
        self._body = body
        self._clock = clock
        self._listed = listed
        self._choices: dict[int, Choice] = {}

    def answer(self, generation: Generation, choices: list[Choice]) -> Any:
        told = [self._told(generation, choice) for choice in choices]
        return told if self._listed else told[0]

    def chunk(self, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return choices[0]

    def choices(self, generation: Generation, event: Event) -> list[dict[str, Any]]:
        choice = self._choices.setdefault(event.index, Choice(event.index))
        choice.add(event)
        if not (event.token_ids or event.text or event.finish_reason):
            return []
        told: dict[str, Any] = dict(self._told(generation, choice))
        return [told | {"index": choice.index} if self._listed else told]

    def _told(self, generation: Generation, choice: Choice) -> Generated:
        call, by_tier = generation.call, generation.requests[choice.index].cached_by_tier
        name = call.rid or generation.id
        meta: MetaInfo = {
            "id": f"{name}-{choice.index}" if self._listed else name,
            "finish_reason": self._reason(generation, choice),
            "prompt_tokens": len(call.prompts[choice.index // call.params.n]),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": sum(by_tier.values()),
            "cached_tokens_by_tier": by_tier,
            "e2e_latency": self._clock() - call.started,
        }
        if self._body.return_logprob:
            meta["input_token_logprobs"], meta["input_top_logprobs"] = self._of_prompt(call, choice)
            meta["output_token_logprobs"] = [self._own(position) for position in choice.logprobs]
            meta["output_top_logprobs"] = [self._top(position) for position in choice.logprobs]
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _reason(self, generation: Generation, choice: Choice) -> dict[str, Any] | None:
        match choice.finish_reason:
            case None:
                return None
            case "stop":
                last = choice.token_ids[-1]
                ended = last in generation.requests[choice.index].stop_ids
                return {"type": "stop"} | ({"matched": last} if ended else {})
            case "length":
                return {"type": "length", "length": len(choice.token_ids)}
            case other:
                return {"type": other}

    def _of_prompt(self, call: Call, choice: Choice) -> tuple[list[Any], list[Any]]:
        """Log-probs of the prompt's tokens from `logprob_start_len` on; the first of all has none."""
        if choice.prompt_logprobs is None:
            return [], []
        first = call.prompts[choice.index // call.params.n][0]
        own = [self._own(position) for position in choice.prompt_logprobs]
        top: list[Any] = [self._top(position) for position in choice.prompt_logprobs]
        if self._body.logprob_start_len == 0:
            return [self._entry(None, first), *own], [None, *top]
        return own, top

    def _own(self, position: TokenLogprob) -> list[Any]:
        return self._entry(finite(position.logprob), position.token_id)

    def _top(self, position: TokenLogprob) -> list[list[Any]]:
        return [self._entry(finite(value), token_id) for token_id, value in position.top]

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        text = token_text(self._tokenizer, token_id) if self._body.return_text_in_logprobs else None
        return [logprob, token_id, text]
