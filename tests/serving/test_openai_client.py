"""The installed `openai` client against a live server: sync, async, streaming, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from helpers.chat_templates import HERMES_TEMPLATE
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import Live

pytestmark = pytest.mark.asyncio

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def client_options(live: Live, key: str = "right") -> dict[str, Any]:
    return {"base_url": f"{live.url}/v1", "api_key": key, "max_retries": 0, "timeout": 10}


async def test_sync_client(serve):
    live = await serve(say("Hello 🙂"), api_key="right")

    def talk() -> None:
        with openai.OpenAI(**client_options(live)) as client:
            assert [model.id for model in client.models.list()] == ["fake"]
            assert client.models.retrieve("fake").id == "fake"
            answer = client.chat.completions.create(
                model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2
            )
            ChatCompletion.model_validate(answer.model_dump(), strict=True)
            assert answer.choices[0].message.content == "Hello 🙂"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
            text = ""
            for chunk in client.chat.completions.create(model="fake", messages=MESSAGES, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == "Hello 🙂"
            completion = client.completions.create(model="fake", prompt=["a", "b"], logprobs=1, max_tokens=5)
            Completion.model_validate(completion.model_dump(), strict=True)
            assert [choice.text for choice in completion.choices] == ["Hello"] * 2
            extra = client.chat.completions.create(
                model="fake", messages=MESSAGES, extra_body={"top_k": 5, "min_p": 0.1, "cache_salt": "s"}
            )
            assert extra.choices[0].finish_reason == "stop"

    await asyncio.to_thread(talk)
    params = live.engine.made[-1].params
    assert (params.top_k, params.min_p) == (5, 0.1)


async def test_async_client_streams(serve):
    live = await serve(say("Hello"), api_key="right")
    async with openai.AsyncOpenAI(**client_options(live)) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
        )
        texts, usage = {0: "", 1: ""}, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == {0: "Hello", 1: "Hello"}
        assert usage is not None
        assert usage.completion_tokens == 12
        async with client.chat.completions.stream(model="fake", messages=MESSAGES) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == "Hello"
        async for chunk in await client.completions.create(model="fake", prompt="x", stream=True):
            assert chunk.choices[0].index == 0


async def test_client_raises_the_right_errors(serve):
    live = await serve(say("x"), api_key="right")
    async with openai.AsyncOpenAI(**client_options(live)) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        live.thread.fault = "the device was lost"
        with pytest.raises(openai.InternalServerError, match="the device was lost"):
            await client.chat.completions.create(model="fake", messages=MESSAGES)
        with pytest.raises(openai.APIError, match="the device was lost"):
            async for _ in await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True):
                pass
    async with openai.AsyncOpenAI(**client_options(live, "wrong")) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_many_streams_at_once_each_get_their_own_text(serve):
    engine = FakeEngine(lambda request, index: [*request.tokens[: request.num_prompt], 257])
    live = await serve(engine=engine, api_key="right", max_running=8)
    async with openai.AsyncOpenAI(**client_options(live)) as client:

        async def one(number: int) -> None:
            prompt, text = f"prompt number {number} 🙂", ""
            stream = await client.completions.create(model="fake", prompt=prompt, max_tokens=99, stream=True)
            async for chunk in stream:
                text += chunk.choices[0].text
            assert text == prompt

        await asyncio.gather(*(one(number) for number in range(64)))
    assert engine.stats.finished == {"stop": 64}


async def test_sync_client_makes_and_continues_responses(serve):
    live = await serve(say("Hello 🙂"), api_key="right")

    def talk() -> None:
        with openai.OpenAI(**client_options(live)) as client:
            first = client.responses.create(model="fake", input="Hi", instructions="Be", metadata={"a": "b"})
            Response.model_validate(first.model_dump(), strict=True)
            assert (first.output_text, first.status) == ("Hello 🙂", "completed")
            second = client.responses.create(model="fake", input="More", previous_response_id=first.id)
            assert client.responses.retrieve(second.id).output_text == "Hello 🙂"
            items = client.responses.input_items.list(second.id)
            assert [item.type for item in items] == ["message"]
            with client.responses.stream(model="fake", input="Hi") as stream:
                text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
                assert text == stream.get_final_response().output_text == "Hello 🙂"
            client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(first.id)
            with pytest.raises(openai.BadRequestError, match="ended"):
                client.responses.cancel(second.id)

    await asyncio.to_thread(talk)


async def test_async_client_streams_responses_with_calls(serve):
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'
    live = await serve(engine=FakeEngine(say("<think>Hm</think>Wait." + call), template=HERMES_TEMPLATE))
    tool: Any = {"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}
    async with openai.AsyncOpenAI(**client_options(live)) as client:
        async with client.responses.stream(model="fake", input="Hi", tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert kinds.count("response.output_item.done") == 3
        turn: list[Any] = [item.model_dump(exclude_none=True) for item in final.output]
        turn.append({"type": "function_call_output", "call_id": turn[-1]["call_id"], "output": "12:00"})
        answer = await client.responses.create(model="fake", input=[*MESSAGES, *turn], tools=[tool])
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
