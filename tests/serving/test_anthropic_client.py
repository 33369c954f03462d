"""The installed `anthropic` client against a live server: sync, async, streaming, tools, errors, and its types."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from pydantic import TypeAdapter

from helpers.chat_templates import HERMES_TEMPLATE
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import Live
from helpers.named_events import stream_events

types = anthropic.types
pytestmark = pytest.mark.asyncio

MODEL = "fake"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CLOCK: Any = {
    "name": "clock",
    "description": "Tells the time",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'
THOUGHT = "<think>\nHm, é.\n</think>\n\n"


def sync_client(live: Live) -> Any:
    return anthropic.Anthropic(base_url=live.url, api_key="right", max_retries=0, timeout=10)


def async_client(live: Live, key: str = "right") -> Any:
    # Any: its answers are unions of two dozen blocks, and each would have to be asked for its kind.
    return anthropic.AsyncAnthropic(base_url=live.url, api_key=key, max_retries=0, timeout=10)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 5}, {"stop_sequences": ["Wait"]}, {"tools": [CLOCK]}])
async def test_answers_are_of_the_package_s_types(serve, fields):
    live = await serve(engine=FakeEngine(say(THOUGHT + "Wait 🙂" + CALL), template=HERMES_TEMPLATE))
    body = {"messages": MESSAGES, "max_tokens": 300} | fields
    status, answer = await live.post("/v1/messages", body)
    assert status == 200
    types.Message.model_validate(answer, strict=True)
    event_type: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
    for event in await stream_events(live, "/v1/messages", body):
        assert event_type.validate_python(event, strict=True).type == event["type"]
    counting = {name: value for name, value in body.items() if name in ("messages", "tools")}
    counted = (await live.post("/v1/messages/count_tokens", counting))[1]
    types.MessageTokensCount.model_validate(counted, strict=True)
    status, problem = await live.post("/v1/messages", {})
    types.ErrorResponse.model_validate(problem, strict=True)


async def test_sync_client(serve):
    live = await serve(engine=FakeEngine(say("Hello 🙂")), api_key="right")

    def talk() -> None:
        with sync_client(live) as client:
            answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=50, system="Be")
            assert [block.text for block in answer.content] == ["Hello 🙂"]
            assert answer.stop_reason == "end_turn"
            counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be")
            used = answer.usage
            assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
            with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=50) as stream:
                assert "".join(stream.text_stream) == "Hello 🙂"
                assert stream.get_final_message().usage.output_tokens == 11
        with anthropic.Anthropic(base_url=live.url, auth_token="right", max_retries=0) as client:
            assert client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=50).role == "assistant"

    await asyncio.to_thread(talk)


async def test_async_client_streams_thoughts_and_calls(serve):
    script = say(THOUGHT + "Wait.\n" + CALL)
    live = await serve(engine=FakeEngine(script, template=HERMES_TEMPLATE), api_key="right")
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "tools": [CLOCK]}
    async with async_client(live) as client:
        whole = await client.messages.create(**asked)
        seen: dict[str, str] = {}
        async with client.messages.stream(**asked) as stream:
            async for event in stream:
                if event.type in ("text", "thinking"):
                    seen[event.type] = seen.get(event.type, "") + getattr(event, event.type)
            final = await stream.get_final_message()
        raw = [event.type async for event in await client.messages.create(stream=True, **asked)]
    assert seen == {"thinking": "Hm, é.", "text": "Wait."}
    assert (raw[0], raw[-1]) == ("message_start", "message_stop")
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.content[-1].input == whole.content[-1].input == {"zone": "CET"}
    exclude = {"id", "usage"}
    told, streamed = (message.model_dump(exclude=exclude) for message in (whole, final))
    for message in (told, streamed):
        message["content"][-1].pop("id")
        # The streaming helper adds this one.
        for block in message["content"]:
            block.pop("parsed_output", None)
    assert told == streamed


async def test_a_tool_loop(serve):
    def script(request, index):
        asked = request.num_prompt < 350
        return say(CALL if asked else "Noon")(request, index)

    live = await serve(engine=FakeEngine(script, template=HERMES_TEMPLATE))
    async with async_client(live) as client:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "tools": [CLOCK]}
        first = await client.messages.create(messages=MESSAGES, **asked)
        result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "12:00 " * 20}
        second = await client.messages.create(
            messages=[*MESSAGES, first.to_param(), {"role": "user", "content": [result]}], **asked
        )
    assert second.content[0].text == "Noon"


async def test_client_raises_the_right_errors(serve):
    live = await serve(babble, api_key="right", step_seconds=0.002)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 50}
    async with async_client(live) as client:
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(extra_body={"temperature": -1}, **asked)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**asked | {"model": "other"})
        live.thread.fault = "the device was lost"
        with pytest.raises(anthropic.InternalServerError, match="the device was lost"):
            await client.messages.create(**asked)
        with pytest.raises(anthropic.APIStatusError, match="the device was lost"):
            async for _ in await client.messages.create(stream=True, **asked):
                pass
    async with async_client(live, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**asked)
