"""`/v1/chat/completions`: a thin translation between OpenAI's chat bodies and the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..core.answer_form import answer_form
from ..core.conversation import Conversation, Prompt, make_call, make_prompt, template_variables
from ..core.generation import Choice, Event, Generation
from ..core.keys import NOW, SERVICE
from ..core.service import Service
from ..core.tool_fields import tool_choice
from ..http.body import read_as
from ..http.streaming import respond_stream, respond_whole
from ..openapi.document import Documented
from ..parsers.choose import CallStyle, make_parser
from ..parsers.parts import OutputParser, Part, Reasoning, Text, ToolCallArguments, ToolCallStart, parse_whole
from .answers import ChatAnswer, ChatChunk
from .bodies import ChatBody, decode_chat, sampling_params
from .logprobs import chat_logprobs, prompt_entries

if TYPE_CHECKING:
    from ...engine.engine import Engine


@Documented(body=ChatBody, answer=ChatAnswer, events=ChatChunk)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    service = request.app[SERVICE]
    started = service.clock()
    service.check_ready()
    body = await read_as(request, decode_chat)
    service.check_model(body.model)
    prompt = await service.in_worker(_prompt, service, body)
    # The engine clips to what the context leaves.
    max_tokens = body.max_completion_tokens or body.max_tokens or service.engine.context_length
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, max_tokens=max_tokens, logprobs=logprobs)
    call = make_call(request, body, prompt, params, prefix="chatcmpl", param="messages", started=started)
    form = ChatForm(service.engine, body, prompt.style, created=int(request.app[NOW]()))
    async with service.generate(call) as generation:
        if body.stream:
            return await respond_stream(request, generation, form, body.stream_options)
        return await respond_whole(generation, form)


def _prompt(service: Service, body: ChatBody) -> Prompt:
    """The prompt that a body makes, for workers. Raises `TemplateError` or `ApiError` 400."""
    tools = body.tools or []
    conversation = Conversation(
        messages=body.messages,
        tools=tools,
        choice=tool_choice(body.tool_choice, [tool["function"]["name"] for tool in tools]),
        parallel=body.parallel_tool_calls is not False,
        form=answer_form(body),
        separate_reasoning=body.separate_reasoning is not False,
        variables=template_variables(body.chat_template_kwargs, body.reasoning_effort),
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        keep=body.truncate_prompt_tokens,
    )
    return make_prompt(service, conversation)


class ChatForm:
    """Chat's shape of answers and chunks."""

    def __init__(self, engine: Engine, body: ChatBody, style: CallStyle, created: int):
        self._engine = engine
        self._style = style
        self._created = created
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._token_ids = bool(body.return_token_ids)
        self._prompt_top = body.prompt_logprobs
        self._parsers: dict[int, OutputParser] = {}
        self._callers: set[int] = set()
        """Choices that have called a tool."""

    def answer(self, generation: Generation, choices: list[Choice]) -> dict[str, Any]:
        answer = self._envelope(generation, "chat.completion", [self._choice(choice) for choice in choices])
        answer["usage"] = generation.usage()
        if self._token_ids:
            answer["prompt_token_ids"] = generation.call.prompts[0]
        return answer | self._prompt_logprobs(choices[0])

    def chunk(self, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope(generation, "chat.completion.chunk", choices)

    def choices(self, generation: Generation, event: Event) -> list[dict[str, Any]]:
        told = []
        if event.index not in self._parsers:
            self._parsers[event.index] = make_parser(self._style)
            told.append(self._opening(generation, event.index) | self._prompt_logprobs(event))
        deltas = [_delta_of(part) for part in self._parts(event)]
        silent = not event.logprobs and not (self._token_ids and event.token_ids)
        if not deltas and not event.finish_reason and silent:
            return told
        choices = [self._delta(event.index, delta) for delta in deltas or [{}]]
        # An answer without tokens has log-probs too: none.
        tells = event.logprobs or event.finish_reason
        choices[0]["logprobs"] = self._logprobs(event) if tells else None
        if self._token_ids:
            choices[0]["token_ids"] = event.token_ids
        choices[-1]["finish_reason"] = _finish_reason(event.finish_reason, event.index in self._callers)
        return told + choices

    def _parts(self, event: Event) -> list[Part]:
        parser = self._parsers[event.index]
        parts = parser.feed(event.text)
        if event.finish_reason is not None:
            parts += parser.finish()
        if any(isinstance(part, ToolCallStart) for part in parts):
            self._callers.add(event.index)
        return parts

    def _opening(self, generation: Generation, index: int) -> dict[str, Any]:
        # Where there is more than text to an answer, its text may be absent, which is not the same as empty.
        told = self._delta(index, {"role": "assistant", "content": None if self._style.tags else ""})
        if self._token_ids:
            told["prompt_token_ids"] = generation.call.prompts[0]
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
        answer = parse_whole(make_parser(self._style), choice.text)
        content = answer.text or None if self._style.tags else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                _call(call.id, {"name": call.name, "arguments": call.arguments}) for call in answer.calls
            ]
        told = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": _finish_reason(choice.finish_reason, bool(answer.calls)),
        }
        if self._token_ids:
            told["token_ids"] = choice.token_ids
        return told

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _prompt_logprobs(self, part: Choice | Event) -> dict[str, Any]:
        if self._prompt_top is None or part.prompt_logprobs is None:
            return {}
        entries = prompt_entries(self._engine.tokenizer, part.prompt_logprobs, self._prompt_top)
        return {"prompt_logprobs": entries}

    def _logprobs(self, part: Choice | Event) -> dict[str, Any] | None:
        return None if self._top is None else chat_logprobs(self._engine.tokenizer, part.logprobs, self._top)


def _delta_of(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            return {"tool_calls": [{"index": index} | _call(id, {"name": name, "arguments": ""})]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(id: str, function: dict[str, str]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": function}


def _finish_reason(engines: str | None, called: bool) -> str | None:
    """An answer that ended of itself after a call waits for the tool; one that was cut off is cut off."""
    return "tool_calls" if called and engines == "stop" else engines
