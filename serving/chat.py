"""`/v1/chat/completions`: a thin translation between OpenAI's chat bodies and the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from .auth import namespace_of
from .body import read_body
from .errors import bad_request
from .generation import Call, Choice, Event, Generation, Service
from .keys import CONFIG, NOW, SERVICE
from .logprobs import chat_logprobs
from .protocol import ChatBody, decode_chat, prefetch_policy, sampling_params
from .streaming import respond_stream, respond_whole

if TYPE_CHECKING:
    from ..engine.engine import Engine


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    service = request.app[SERVICE]
    started = service.clock()
    service.check_ready()
    body = decode_chat(await read_body(request, request.app[CONFIG].max_body_size))
    service.check_model(body.model)
    prompt = await service.in_worker(encode_messages, service, body)
    # The engine clips to what the context leaves.
    max_tokens = body.max_completion_tokens or body.max_tokens or service.engine.context_length
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    call = Call(
        prefix="chatcmpl",
        prompts=[prompt],
        params=sampling_params(body, max_tokens=max_tokens, logprobs=logprobs),
        namespace=namespace_of(request, body.cache_salt),
        prefetch=prefetch_policy(body),
        priority=body.priority or 0,
        param="messages",
        started=started,
    )
    form = ChatForm(service.engine, body, created=int(request.app[NOW]()))
    async with service.generate(call) as generation:
        if body.stream:
            return await respond_stream(request, generation, form, body.stream_options)
        return await respond_whole(generation, form)


def encode_messages(service: Service, body: ChatBody) -> list[int]:
    """Token ids of the templated conversation. Raises `TemplateError` or `ApiError` 400."""
    engine = service.engine
    if engine.chat_template is None:
        raise bad_request("This model has no chat template; use /v1/completions.", "messages")
    try:
        text = engine.chat_template.render(
            body.messages,
            add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            **_template_variables(body),
        )
    except RecursionError:
        raise bad_request("messages are nested too deeply.", "messages") from None
    # The template writes the begin-of-text token itself where the model wants one.
    return service.encode(text, add_bos=False, param="messages")


def _template_variables(body: ChatBody) -> dict[str, Any]:
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in ("messages", "add_generation_prompt", "continue_final_message"):
            raise bad_request(f"chat_template_kwargs: {name} is a field of the body.", "chat_template_kwargs")
    return variables


class ChatForm:
    """Chat's shape of answers and chunks."""

    def __init__(self, engine: Engine, body: ChatBody, created: int):
        self._engine = engine
        self._created = created
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._token_ids = bool(body.return_token_ids)
        self._opened: set[int] = set()

    def answer(self, generation: Generation, choices: list[Choice]) -> dict[str, Any]:
        answer = self._envelope(generation, "chat.completion", [self._choice(choice) for choice in choices])
        answer["usage"] = generation.usage()
        if self._token_ids:
            answer["prompt_token_ids"] = generation.call.prompts[0]
        return answer

    def chunk(self, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope(generation, "chat.completion.chunk", choices)

    def choices(self, generation: Generation, event: Event) -> list[dict[str, Any]]:
        told = []
        if event.index not in self._opened:
            self._opened.add(event.index)
            told.append(self._delta(event.index, {"role": "assistant", "content": ""}))
            if self._token_ids:
                told[0]["prompt_token_ids"] = generation.call.prompts[0]
        silent = not event.logprobs and not (self._token_ids and event.token_ids)
        if event.text or event.finish_reason or not silent:
            choice = self._delta(event.index, {"content": event.text} if event.text else {})
            choice["logprobs"] = self._logprobs(event) if event.logprobs else None
            choice["finish_reason"] = event.finish_reason
            if self._token_ids:
                choice["token_ids"] = event.token_ids
            told.append(choice)
        return told

    def _envelope(self, generation: Generation, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": generation.id,
            "object": kind,
            "created": self._created,
            "model": self._engine.model_name,
            "choices": choices,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        told = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        if self._token_ids:
            told["token_ids"] = choice.token_ids
        return told

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, part: Choice | Event) -> dict[str, Any] | None:
        return None if self._top is None else chat_logprobs(self._engine.tokenizer, part.logprobs, self._top)
