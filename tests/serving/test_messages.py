"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest

from helpers.byte_tokenizer import CHAT_TEMPLATE, IM_END, VOCAB_SIZE
from helpers.chat_templates import HERMES_TEMPLATE
from helpers.fake_engine import FakeEngine, Script, babble, say
from helpers.live_server import Live, eventually
from helpers.named_events import stream_events

pytestmark = pytest.mark.asyncio

MESSAGES = "/v1/messages"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
CLOCK = {
    "name": "clock",
    "description": "Tells the time",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'
THOUGHT = "<think>\nHm, é.\n</think>\n\n"


async def ask(live: Live, **fields: Any) -> dict[str, Any]:
    status, answer = await live.post(MESSAGES, HI | fields)
    assert status == 200, answer
    return answer


async def refusal(live: Live, status: int, path: str = MESSAGES, **fields: Any) -> dict[str, Any]:
    got, answer = await live.post(path, HI | fields)
    assert (got, answer["type"], set(answer)) == (status, "error", {"type", "error"}), answer
    return answer["error"]


def hermes(script: Script) -> FakeEngine:
    return FakeEngine(script, template=HERMES_TEMPLATE)


def prompt_text(engine: FakeEngine) -> str:
    """The last prompt, special tokens written out."""
    request = engine.made[-1]
    return engine.tokenizer.decode(request.tokens[: request.num_prompt], skip_special_tokens=False)


def anonymous(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs from run to run."""
    message = copy.deepcopy(message)
    del message["id"]
    message["usage"] = {"output_tokens": message["usage"]["output_tokens"]}
    for block in message["content"]:
        block.pop("id", None)
    return message


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as its events give it."""
    start, *rest = events
    message = copy.deepcopy(start["message"])
    inputs: dict[int, str] = {}
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(copy.deepcopy(event["content_block"]))
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


async def test_answer_has_anthropic_shape(serve):
    live = await serve(say("Hello!"))
    answer = await ask(live, system="Be brief", metadata={"user_id": "u"}, temperature=0.5, top_k=5)
    prompt = live.engine.made[0].num_prompt
    assert answer == {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt,
            "cache_read_input_tokens": 0,
            "cache_read_input_tokens_by_tier": {"device": 0, "host": 0, "disk": 0},
            "cache_creation_input_tokens": 0,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert prompt_text(live.engine) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    again = (await ask(live, system="Be brief"))["usage"]
    assert (again["input_tokens"], again["cache_read_input_tokens"]) == (1, prompt - 1)


async def test_stream_tells_events_in_order(serve):
    live = await serve(say("Hé"))
    events = await stream_events(live, MESSAGES, HI)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [event["delta"]["text"] for event in events[2:4]] == ["H", "é"]
    usage = events[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == live.engine.made[0].num_prompt


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello 🙂", {}),
        ("", {}),
        ("abcdef", {"max_tokens": 4}),
        ("잘🙂", {"max_tokens": 5}),
        ("say stop now", {"stop_sequences": ["now", "stop"]}),
        (THOUGHT + "Noon", {}),
        (THOUGHT + "Noon", {"stop_sequences": ["oo"]}),
        (THOUGHT, {}),
        ("<think>cut", {"max_tokens": 9}),
        (CALL, {"tools": [CLOCK]}),
        (CALL, {"tools": [CLOCK], "tool_choice": {"type": "none"}}),
        (THOUGHT + "Wait.\n" + CALL + "\n" + CALL, {"tools": [CLOCK]}),
        (CALL + CALL, {"tools": [CLOCK], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        (CALL, {"tools": [CLOCK], "max_tokens": 40}),
    ],
)
async def test_streamed_equals_whole(serve, text, fields):
    live = await serve(engine=hermes(say(text)))
    whole = await ask(live, **fields)
    events = await stream_events(live, MESSAGES, HI | fields)
    assert anonymous(rebuilt(events)) == anonymous(whole)


async def test_thinking_text_and_calls_are_blocks(serve):
    live = await serve(engine=hermes(say(THOUGHT + "Wait.\n" + CALL + CALL)))
    answer = await ask(live, tools=[CLOCK])
    thought, text, *calls = answer["content"]
    assert thought == {"type": "thinking", "thinking": "Hm, é.", "signature": ""}
    assert text == {"type": "text", "text": "Wait."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "clock", {"zone": "CET"})
    ] * 2
    assert calls[0]["id"] != calls[1]["id"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] >= len("Hm, é.".encode())
    assert '"name": "clock"' in prompt_text(live.engine)


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("done", {}, "end_turn", None),
        ("done", {"stop_sequences": ["x"]}, "end_turn", None),
        ("a stop", {"stop_sequences": ["x", "stop"]}, "stop_sequence", "stop"),
        ("abcd", {"stop_sequences": ["bcd", "bc"]}, "stop_sequence", "bc"),
        ("abcd", {"stop_sequences": ["c", "bc"]}, "stop_sequence", "bc"),
        ("🙂é", {"stop_sequences": ["é"]}, "stop_sequence", "é"),
        (THOUGHT + "a stop", {"stop_sequences": ["stop"]}, "stop_sequence", "stop"),
        ("abcd", {"max_tokens": 2}, "max_tokens", None),
    ],
)
async def test_why_it_stopped(serve, text, fields, reason, sequence):
    live = await serve(engine=hermes(say(text)))
    answer = await ask(live, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


async def test_a_full_context_is_told(serve):
    live = await serve(engine=FakeEngine(babble, context_length=60))
    assert (await ask(live))["stop_reason"] == "model_context_window_exceeded"


async def test_every_form_of_message(serve):
    live = await serve(engine=hermes(say("ok")))
    cached = {"cache_control": {"type": "ephemeral"}}
    await ask(
        live,
        system=[{"type": "text", "text": "Be"} | cached, {"type": "text", "text": "brief"}],
        messages=[
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"} | cached]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "thinking", "thinking": "Hm", "signature": ""},
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "c1", "name": "clock", "input": {"zone": "CET"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "12:00"}],
                    },
                    {"type": "tool_result", "tool_use_id": "c2"},
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        tools=[CLOCK | cached],
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        thinking={"type": "disabled"},
    )
    assert prompt_text(live.engine).partition("<|im_end|>\n")[2] == (
        "<|im_start|>system\nBe\nbrief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        '<|im_start|>assistant\nWait.<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n12:00<|im_end|>\n<|im_start|>tool\n<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


async def test_a_begun_answer_is_completed(serve):
    live = await serve(say(" there"))
    answer = await ask(live, messages=[*HI["messages"], {"role": "assistant", "content": "Well"}])
    assert prompt_text(live.engine).endswith("<|im_start|>assistant\nWell")
    assert answer["content"] == [{"type": "text", "text": " there"}]


async def test_tokens_are_counted_without_generating(serve):
    live = await serve(engine=hermes(say("ok")))
    fields = {"system": "Be", "messages": HI["messages"], "tools": [CLOCK]}
    assert await live.post(MESSAGES + "/count_tokens", fields) == (200, {"input_tokens": 294})
    assert live.engine.made == []
    await ask(live, **fields)
    assert live.engine.made[0].num_prompt == 294


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0]: blocks of type 'image'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}],
                    }
                ]
            },
            "messages[0].content[0].content[0]: blocks of type 'image'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                    }
                ]
            },
            "add their results",
        ),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "system[0]"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]: tools of type 'web_search",
        ),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "watch"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name: clock is there twice"),
        (
            {"tools": [CLOCK | {"strict": True, "input_schema": {"not": {}}}]},
            "tools[0].input_schema: json_schema: not",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"not": {}}}},
            "output_format: json_schema: not",
        ),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"messages": [{"role": "user", "content": "x" * 50_000}]}, "context length"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(serve, fields, named):
    live = await serve(engine=hermes(say("ok")))
    error = await refusal(live, 400, **fields)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    await ask(live)


async def test_errors_have_anthropic_shape(serve):
    live = await serve(babble, api_key="right", step_seconds=0.005, max_body_size=2000)
    session = live.session
    for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer wrong"}):
        async with session.post(live.url + MESSAGES, json=HI, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (
                401,
                "authentication_error",
            )
    session.headers["x-api-key"] = "right"
    assert (await refusal(live, 404, model="other"))["type"] == "not_found_error"
    assert (await refusal(live, 404, path=MESSAGES + "/batches"))["type"] == "not_found_error"
    assert (await refusal(live, 413, system="x" * 3000))["type"] == "request_too_large"
    status, answer = await live.get(MESSAGES)
    assert (status, answer["type"]) == (405, "error")
    assert "param" in (await live.get("/v1/models/x"))[1]["error"], "other routes keep OpenAI's form"
    live.thread.fault = "the device was lost"
    assert (await refusal(live, 500))["type"] == "api_error"
    events = await stream_events(live, MESSAGES, HI)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the device was lost"}}
    live.thread.is_ready = False
    assert (await refusal(live, 503))["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_aborts(serve, stream):
    live = await serve(babble, step_seconds=0.01)
    pending = live.session.post(live.url + MESSAGES, json=HI | {"stream": stream})
    if stream:
        response = await pending
        await response.content.readline()
        response.close()
    else:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pending, 0.2)
    await eventually(lambda: not live.thread.running and not live.thread.waiting)
    assert live.engine.stats.finished == {"abort": 1}


async def test_end_token_is_no_text(serve):
    live = await serve(lambda request, index: [*b"ok", IM_END])
    answer = await ask(live, stop_sequences=["<|im_end|>"])
    assert (answer["content"][0]["text"], answer["stop_reason"]) == ("ok", "end_turn")


async def test_tags_that_are_special_tokens(serve):
    """Whole in one token, a tag holds several stop sequences: the first to be complete is told."""
    think, close, tool = range(VOCAB_SIZE, VOCAB_SIZE + 3)
    engine = FakeEngine(
        lambda request, index: [think, *b"Hm", close, *b"ok", tool, *b"{"],
        template="{# tools, <tool_call>, </think> #}" + CHAT_TEMPLATE,
        more_specials=("<think>", "</think>", "<tool_call>"),
    )
    live = await serve(engine=engine)
    answer = await ask(live, tools=[CLOCK], stop_sequences=["<tool_call>", "<tool"])
    assert [block.get("thinking") or block.get("text") for block in answer["content"]] == ["Hm", "ok"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "<tool")
