"""Answers and every event of streams are what the installed `openai` package takes them for: strictly, types of all fields.

What goes beyond OpenAI's protocol is listed here, so that nothing slips in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from helpers.chat_templates import HERMES_TEMPLATE
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES

pytestmark = pytest.mark.asyncio

EXTRAS = {
    *("cached_tokens_by_tier", "max_model_len", "embeddings"),
    *("token_ids", "prompt_token_ids", "prompt_logprobs", "reasoning_content"),
    # Of logprobs: null in a completion's, where the type has nothing.
    "refusal",
    # OpenAI's own service answers with it too.
    "store",
    # Of the events of a stream, whose log-probs are typed more narrowly than those of the whole answer.
    *("bytes", "name"),
}
"""Fields of answers that OpenAI's types do not have."""
RESPONSES = "/v1/responses"
TOOL: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object"}}
WRITTEN = '<think>Why?</think>So 🙂: <tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>'
LOGPROBS = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}

Case = tuple[str, dict[str, Any], Any, Any]
CASES: list[Case] = [
    (CHAT, {}, ChatCompletion, ChatCompletionChunk),
    (CHAT, {"n": 2, "max_tokens": 3}, ChatCompletion, ChatCompletionChunk),
    (CHAT, LOGPROBS, ChatCompletion, ChatCompletionChunk),
    (CHAT, {"tools": [{"type": "function", "function": TOOL}]}, ChatCompletion, ChatCompletionChunk),
    (COMPLETIONS, {}, Completion, Completion),
    (COMPLETIONS, {"n": 2, "logprobs": 2, "return_token_ids": True}, Completion, Completion),
    (COMPLETIONS, {"prompt": ["a", "b"], "stop": "So"}, Completion, Completion),
    (COMPLETIONS, {"echo": True, "max_tokens": 2}, Completion, Completion),
    (RESPONSES, {}, Response, ResponseStreamEvent),
    (RESPONSES, {"tools": [{"type": "function"} | TOOL]}, Response, ResponseStreamEvent),
    (RESPONSES, {"max_output_tokens": 4, "metadata": {"a": "b"}}, Response, ResponseStreamEvent),
    (
        RESPONSES,
        {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        Response,
        ResponseStreamEvent,
    ),
]
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 99},
    RESPONSES: {"input": "Hi", "instructions": "Be kind."},
}


def extras(model: Any) -> Iterator[str]:
    """Names of fields that the types do not know, at any depth."""
    if isinstance(model, BaseModel):
        yield from model.model_extra or {}
        for name in type(model).model_fields:
            yield from extras(getattr(model, name))
    elif isinstance(model, list):
        for part in model:
            yield from extras(part)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    # Takes a second to make for the union of all events.
    return TypeAdapter(kind)


def assert_is(kind: Any, answer: Any) -> None:
    model = adapter(kind).validate_python(answer, strict=True)
    assert set(extras(model)) <= EXTRAS


def finished(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk of a completion with finish reasons: OpenAI's are null before the last too, for which there is no type."""
    choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    return chunk | {"choices": choices}


def engine() -> FakeEngine:
    return FakeEngine(say(WRITTEN), template=HERMES_TEMPLATE)


@pytest.mark.parametrize(("path", "fields", "kind", "_"), CASES)
async def test_whole_answers(serve, path, fields, kind, _):
    live = await serve(engine=engine())
    status, answer = await live.post(path, PROMPTS[path] | fields)
    assert status == 200, answer
    assert_is(kind, answer)


@pytest.mark.parametrize(("path", "fields", "_", "kind"), CASES)
async def test_streamed_answers(serve, path, fields, _, kind):
    live = await serve(engine=engine())
    body = PROMPTS[path] | fields | {"stream": True}
    if path != RESPONSES:
        body["stream_options"] = {"include_usage": True}
    async with live.session.post(live.url + path, json=body) as response:
        assert response.status == 200
        lines = (await response.text()).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    assert len(events) > 3
    for event in events:
        assert_is(kind, finished(json.loads(event)) if kind is Completion else json.loads(event))


async def test_models(serve):
    live = await serve()
    _, answer = await live.get("/v1/models")
    assert (answer["object"], len(answer["data"])) == ("list", 1)
    assert_is(Model, answer["data"][0])
    assert_is(Model, (await live.get("/v1/models/fake"))[1])


@pytest.mark.parametrize("value", ["a", ["a", "b"], [65], [[65], [66]]])
async def test_embeddings(serve, value):
    live = await serve()
    status, answer = await live.post("/v1/embeddings", {"input": value})
    assert status == 200, answer
    assert_is(CreateEmbeddingResponse, answer)


async def test_stored_responses(serve):
    live = await serve(engine=engine())
    _, made = await live.post(RESPONSES, {"input": "Hi"})
    _, kept = await live.get(f"{RESPONSES}/{made['id']}")
    assert kept == made
    _, further = await live.post(RESPONSES, {"input": "On", "previous_response_id": made["id"]})
    assert_is(Response, further)
    assert further["previous_response_id"] == made["id"]
