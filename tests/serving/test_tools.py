"""Tools in chat: what the template sees, what comes back, streamed and not, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.byte_tokenizer import EOS, VOCAB_SIZE
from helpers.chat_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import CHAT, MESSAGES, Live
from helpers.tiered_engine import TieredEngine
from tierax.engine.chat_template import ChatTemplate
from tierax.serving.parsers.parts import Answer, ToolCall

pytestmark = pytest.mark.asyncio

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "clock"}}]
CALLS = (
    'One moment.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kö<ln> 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def hermes(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(say(text), template=HERMES_TEMPLATE, **options)


def prompt_of(live: Live) -> str:
    request = live.engine.made[-1]
    return live.engine.tokenizer.decode(request.tokens[: request.num_prompt], skip_special_tokens=False)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[Answer, str]:
    """One choice of a stream put together as clients do, with its finish reason."""
    answer, reason = Answer(), ""
    for told in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        assert not reason, "a choice went on after its finish reason"
        delta, reason = told["delta"], told["finish_reason"] or ""
        answer.text += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(answer.calls)
                assert call["type"] == "function"
                answer.calls.append(ToolCall(call["id"], call["function"]["name"]))
            answer.calls[call["index"]].arguments += call["function"]["arguments"]
    return answer, reason


def told(choice: dict[str, Any]) -> tuple[Answer, str]:
    """A choice of a whole answer in the same terms."""
    message = choice["message"]
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    answer = Answer(message["content"] or "", message.get("reasoning_content", ""), calls)
    return answer, choice["finish_reason"]


def without_ids(answer: Answer) -> Answer:
    for call in answer.calls:
        assert call.id.startswith("call_")
        call.id = ""
    return answer


async def test_calls_streamed_and_whole(serve):
    live = await serve(engine=hermes(CALLS))
    whole = await live.chat(tools=TOOLS)
    ChatCompletion.model_validate(whole, strict=True)
    answer, reason = told(whole["choices"][0])
    ids = {call.id for call in answer.calls}
    assert len(ids) == 2
    assert without_ids(answer) == Answer(
        "One moment.", "", [ToolCall("", "weather", '{"city": "Kö<ln> 🙂"}'), ToolCall("", "clock", "{}")]
    )
    assert reason == "tool_calls"
    chunks = await live.stream(CHAT, tools=TOOLS, n=2)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    for index in range(2):
        streamed, end = joined(chunks, index)
        assert ids.isdisjoint(call.id for call in streamed.calls)
        assert (without_ids(streamed), end) == (answer, reason)


async def test_an_answer_of_calls_alone_has_no_content(serve):
    live = await serve(engine=hermes('<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n'))
    message = (await live.chat(tools=TOOLS))["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["clock"]
    deltas = [
        choice["delta"] for chunk in await live.stream(CHAT, tools=TOOLS) for choice in chunk["choices"]
    ]
    assert all(delta.get("content") is None for delta in deltas)


async def test_llama_calls_without_a_tag(serve):
    text = '{"name": "weather", "parameters": {"city": "Ulm"}}'
    live = await serve(engine=FakeEngine(say(text), template=LLAMA3_TEMPLATE))
    answer, reason = told((await live.chat(tools=TOOLS))["choices"][0])
    assert without_ids(answer) == Answer("", "", [ToolCall("", "weather", '{"city": "Ulm"}')])
    assert reason == "tool_calls"
    assert without_ids(joined(await live.stream(CHAT, tools=TOOLS))[0]) == answer
    # Without tools the same text is an answer like any other.
    answer, reason = told((await live.chat())["choices"][0])
    assert (answer, reason) == (Answer(text), "stop")


async def test_a_tag_that_is_a_special_token_is_seen_but_not_shown(serve):
    tokens = [VOCAB_SIZE, *b'{"name": "clock", "parameters": {}}', 258, EOS]
    engine = FakeEngine(
        lambda request, index: tokens, template=LLAMA3_TEMPLATE, more_specials=("<|python_tag|>",)
    )
    live = await serve(engine=engine)
    answer, _ = told((await live.chat(tools=[WEATHER]))["choices"][0])
    assert without_ids(answer) == Answer("", "", [ToolCall("", "clock", "{}")])
    answer, _ = told((await live.chat())["choices"][0])
    assert answer == Answer('{"name": "clock", "parameters": {}}')


@pytest.mark.parametrize(
    "text",
    [
        'Now <tool_call>{"name": "clock", "arguments": {,}}</tool_call> and then',
        '<tool_call>{"name": "clock", "arguments": {"a": "',
        "a <tool_",
        "<tool_call>\n",
        '<tool_call>{"arguments": {}}</tool_call>\n',
    ],
)
async def test_what_is_no_call_stays_text(serve, text):
    live = await serve(engine=hermes(text))
    assert told((await live.chat(tools=TOOLS))["choices"][0]) == (Answer(text), "stop")
    assert joined(await live.stream(CHAT, tools=TOOLS)) == (Answer(text), "stop")


async def test_a_call_that_is_cut_off_is_text_and_says_length(serve):
    live = await serve(engine=hermes(CALLS))
    first = len(CALLS.partition("</tool_call>")[0].encode())
    for tokens, calls in ((first - 5, 0), (first + 20, 1)):
        whole = told((await live.chat(tools=TOOLS, max_tokens=tokens))["choices"][0])
        assert (len(whole[0].calls), whole[1]) == (calls, "length")
        streamed = joined(await live.stream(CHAT, tools=TOOLS, max_tokens=tokens))
        assert (without_ids(streamed[0]), streamed[1]) == (without_ids(whole[0]), whole[1])


async def test_stop_strings_see_the_text_as_it_was_written(serve):
    live = await serve(engine=hermes(CALLS))
    answer, reason = told((await live.chat(tools=TOOLS, stop="</tool_call>"))["choices"][0])
    assert [call.name for call in answer.calls] == ["weather"]
    assert reason == "tool_calls"
    answer, reason = told((await live.chat(tools=TOOLS, stop=["moment"]))["choices"][0])
    assert (answer, reason) == (Answer("One "), "stop")
    fields: dict[str, Any] = {"stop": ["moment"], "include_stop_str_in_output": True}
    answer, reason = told((await live.chat(tools=TOOLS, **fields))["choices"][0])
    assert (answer, reason) == (Answer("One moment"), "stop")


async def test_logprobs_and_token_ids_cover_the_calls(serve):
    live = await serve(engine=hermes(CALLS))
    fields: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = (await live.chat(**fields))["choices"][0]
    data = bytes(b for entry in whole["logprobs"]["content"] for b in entry["bytes"])
    assert data.decode() == CALLS
    choices = [choice for chunk in await live.stream(CHAT, **fields) for choice in chunk["choices"]]
    content = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == whole["token_ids"]


async def test_parallel_tool_calls_off_gives_one(serve):
    live = await serve(engine=hermes(CALLS))
    fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    whole = told((await live.chat(**fields))["choices"][0])
    assert [call.name for call in whole[0].calls] == ["weather"]
    assert whole[0].text == "One moment."
    streamed = joined(await live.stream(CHAT, **fields))
    assert (without_ids(streamed[0]), streamed[1]) == (without_ids(whole[0]), whole[1])


async def test_tool_choice_none_keeps_the_prompt_and_reads_no_calls(serve):
    live = await serve(engine=hermes(CALLS))
    await live.chat(tools=TOOLS)
    with_tools = prompt_of(live)
    assert told((await live.chat(tools=TOOLS, tool_choice="none"))["choices"][0]) == (Answer(CALLS), "stop")
    assert prompt_of(live) == with_tools
    await live.chat()
    assert prompt_of(live) != with_tools


async def test_the_template_gets_tools_calls_and_results(serve):
    live = await serve(engine=hermes("It is 9."))
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Ulm"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    answer = await live.chat(messages=messages, tools=[WEATHER])
    assert told(answer["choices"][0]) == (Answer("It is 9."), "stop")
    prompt = prompt_of(live)
    assert json.dumps(WEATHER) in prompt
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\nrain<|im_end|>" in prompt


async def test_a_conversation_with_tools_can_be_warmed(serve):
    engine = TieredEngine(pages=256, host_pages=256, disk=False)
    engine.chat_template = ChatTemplate(HERMES_TEMPLATE, None, None)
    live = await serve(engine=engine)
    system = [{"role": "system", "content": "Be brief."}]
    status, answer = await live.post("/cache/warm", {"items": [{"messages": system, "tools": TOOLS}]})
    assert (status, answer["failed"]) == (200, 0)
    fields: dict[str, Any] = {"messages": [*system, *MESSAGES], "max_tokens": 1}
    details = (await live.chat(**fields, tools=TOOLS))["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= answer["items"][0]["prompt_tokens"] - 4
    assert (await live.chat(**fields))["usage"]["prompt_tokens_details"]["cached_tokens"] < 40
    bad = [{"prompt": "x", "tools": TOOLS}, {"messages": system, "tools": [{}]}]
    _, answer = await live.post("/cache/warm", {"items": bad})
    params = [item["error"]["param"] for item in answer["items"]]
    assert params == ["items[0].tools", "items[1].tools[0].type"]


async def test_a_parser_can_be_named(serve):
    live = await serve(engine=hermes(CALLS), tool_call_parser="llama3")
    assert told((await live.chat(tools=TOOLS))["choices"][0]) == (Answer(CALLS), "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 5}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2000}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "watch"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "watch"}]}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[0].tool_calls[0].type"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    ],
)  # fmt: skip
async def test_mistakes_are_named(serve, fields, param):
    live = await serve(engine=hermes("fine"))
    status, answer = await live.post(CHAT, {"messages": MESSAGES} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert (await live.chat(tools=TOOLS))["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize(
    ("options", "config", "words"),
    [
        ({"template": True}, {}, "--tool-call-parser"),
        ({"template": True}, {"tool_call_parser": "hermes"}, "chat template"),
        ({"template": HERMES_TEMPLATE}, {"tool_call_parser": "none"}, "--tool-call-parser"),
    ],
)
async def test_tools_that_would_be_lost_are_refused(serve, options, config, words):
    live = await serve(engine=FakeEngine(say("fine"), **options), **config)
    status, answer = await live.post(CHAT, {"messages": MESSAGES, "tools": TOOLS})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert words in answer["error"]["message"]
    assert (await live.chat(tools=TOOLS, tool_choice="none"))["choices"][0]["message"]["content"] == "fine"


async def test_openai_client(serve):
    live = await serve(engine=hermes(CALLS))
    options: dict[str, Any] = {"base_url": f"{live.url}/v1", "api_key": "-", "max_retries": 0, "timeout": 10}
    fields: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": TOOLS}

    def talk() -> list[tuple[str, str]]:
        with openai.OpenAI(**options) as client:
            answer = client.chat.completions.create(**fields)
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            calls = choice.message.tool_calls
            assert calls is not None
            # What came back goes into the next turn as it is.
            results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
            messages = [*MESSAGES, choice.message.to_dict(), *results]
            client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)  # pyright: ignore[reportArgumentType]
            return [(c.function.name, c.function.arguments) for c in calls if c.type == "function"]

    called = await asyncio.to_thread(talk)
    assert called == [("weather", '{"city": "Kö<ln> 🙂"}'), ("clock", "{}")]
    assert 'arguments": {"city": "Kö<ln> 🙂"}' in prompt_of(live)
    async with openai.AsyncOpenAI(**options) as client:
        async with client.chat.completions.stream(**fields) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "One moment."
        assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls or []] == called
        seen = Answer()
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.function is not None
                if call.id:
                    seen.calls.append(ToolCall(call.id, call.function.name or ""))
                seen.calls[call.index].arguments += call.function.arguments or ""
        assert [(call.name, call.arguments) for call in seen.calls] == called
