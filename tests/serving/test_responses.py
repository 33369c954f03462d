"""`/v1/responses`: shapes, streams, and every form of input."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from helpers.byte_tokenizer import BOS
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import eventually
from helpers.named_events import stream_events
from helpers.responses_client import CALL, CLOCK, EVENT, RESPONSES, hermes, prompt_text, refusal, respond

pytestmark = pytest.mark.asyncio

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
THOUGHT = "<think>\nHm, é.\n</think>\n\n"


def anonymous(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from run to run."""
    response = copy.deepcopy(response)
    for key in ("id", "created_at", "completed_at"):
        del response[key]
    for item in response["output"]:
        del item["id"]
        item.pop("call_id", None)
    if response["usage"]:
        del response["usage"]["input_tokens_details"]
    return response


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items as the deltas alone give them."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items[event["output_index"]] = copy.deepcopy(event["item"])
            case "content_part.added":
                items[event["output_index"]]["content"].append(copy.deepcopy(event["part"]))
            case "output_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "reasoning_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert items[event["output_index"]] == event["item"]
    return list(items.values())


async def test_answer_has_openai_shape(serve):
    live = await serve(say("Hello!"))
    answer = await respond(live, instructions="Be brief", metadata={"a": "b"}, user="u", temperature=0.5)
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "fake")
    assert [(item["type"], item["status"], item["role"]) for item in answer["output"]] == [
        ("message", "completed", "assistant")
    ]
    assert answer["output"][0]["content"] == [
        {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
    ]
    prompt = live.engine.made[0].num_prompt
    assert answer["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cached_tokens_by_tier": {"device": 0, "host": 0, "disk": 0},
            "cache_write_tokens": 0,
        },
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 7,
    }
    told = {name: answer[name] for name in ("instructions", "metadata", "user", "temperature", "store")}
    assert told == {
        "instructions": "Be brief",
        "metadata": {"a": "b"},
        "user": "u",
        "temperature": 0.5,
        "store": True,
    }
    assert prompt_text(live.engine) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_rendered_prompt_gets_no_other_begin_token(serve):
    live = await serve(engine=FakeEngine(say("ok"), add_bos=True))
    first = await respond(live)
    await respond(live, "More", previous_response_id=first["id"])
    await live.post("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    assert [BOS in request.tokens for request in live.engine.made] == [False] * 3


async def test_stream_tells_events_in_order(serve):
    live = await serve(say("Hé"))
    events = await stream_events(live, RESPONSES, {"input": "Hi"})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["delta"] for event in events if "delta" in event] == ["H", "é"]
    assert events[0]["response"]["status"] == "in_progress"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello 🙂", {}),
        ("", {}),
        ("abcdef", {"max_output_tokens": 4}),
        ("잘🙂", {"max_output_tokens": 5}),
        ("say stop now", {"stop": ["stop"]}),
        ("aé🙂", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (THOUGHT + "Noon", {"include": ["message.output_text.logprobs"]}),
        (THOUGHT, {}),
        ("<think>cut", {"max_output_tokens": 9}),
        (CALL, {"tools": [CLOCK]}),
        (CALL, {"tools": [CLOCK], "tool_choice": "none"}),
        (THOUGHT + "Wait.\n" + CALL + "\n" + CALL, {"tools": [CLOCK]}),
        (CALL + CALL, {"tools": [CLOCK], "parallel_tool_calls": False}),
        (CALL, {"tools": [CLOCK], "max_output_tokens": 40}),
    ],
)
async def test_streamed_equals_whole(serve, text, fields):
    live = await serve(engine=hermes(say(text)))
    whole = await respond(live, **fields)
    events = await stream_events(live, RESPONSES, {"input": "Hi"} | fields)
    for event in events:
        assert EVENT.validate_python(event, strict=True).type == event["type"]
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert anonymous(last["response"]) == anonymous(whole)
    assert rebuilt(events) == last["response"]["output"]


async def test_reasoning_text_and_calls_are_items(serve):
    live = await serve(engine=hermes(say(THOUGHT + "Wait.\n" + CALL + CALL)))
    answer = await respond(live, tools=[CLOCK])
    thought, message, *calls = answer["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, é."}]
    assert message["content"][0]["text"] == "Wait."
    assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("function_call", "clock", {"zone": "CET"})
    ] * 2
    assert calls[0]["call_id"] != calls[1]["call_id"]
    assert len({item["id"] for item in answer["output"]}) == 4
    reasoning = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert len("Hm, é.".encode()) <= reasoning <= len(THOUGHT.encode())
    assert answer["tools"][0] == CLOCK | {"strict": False}
    assert '"name": "clock"' in prompt_text(live.engine)


async def test_log_probs_belong_to_the_text(serve):
    live = await serve(engine=hermes(say(THOUGHT + "Né")))
    answer = await respond(live, include=["message.output_text.logprobs"], top_logprobs=2)
    told = answer["output"][1]["content"][0]["logprobs"]
    assert bytes(byte for entry in told for byte in entry["bytes"]).decode() == "Né"
    assert [len(entry["top_logprobs"]) for entry in told] == [2, 2, 2]
    plain = await serve(say("Né"))
    answer = await respond(plain, include=["message.output_text.logprobs"])
    told = answer["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for entry in told for byte in entry["bytes"]).decode() == "Né"
    assert [entry["top_logprobs"] for entry in told] == [[], [], []]


async def test_length_makes_a_response_incomplete(serve):
    live = await serve(babble)
    answer = await respond(live, max_output_tokens=5)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["output"][0]["status"], answer["completed_at"]) == ("incomplete", None)
    assert answer["usage"]["output_tokens"] == 5


async def test_every_form_of_input(serve):
    live = await serve(engine=hermes(say("ok")))
    items = [
        {"role": "developer", "content": "Be"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "rs-1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"zone": "CET"}'},
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": '{"zone": "UTC"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "message", "role": "assistant", "content": "One."},
        {"role": "user", "content": "and?"},
    ]
    answer = await respond(live, items)
    assert prompt_text(live.engine) == (
        "<|im_start|>system\nBe<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nWait."
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n"
        "<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    status, listed = await live.get(f"{RESPONSES}/{answer['id']}/input_items", params={"order": "asc"})
    assert (status, listed["has_more"], len(listed["data"])) == (200, False, len(items))
    for item in listed["data"]:
        ITEM.validate_python(item, strict=True)


async def test_input_items_come_in_pages(serve):
    live = await serve(say("ok"))
    answer = await respond(live, [{"role": "user", "content": str(i)} for i in range(5)])
    path, seen, after = f"{RESPONSES}/{answer['id']}/input_items", [], {}
    while True:
        status, page = await live.get(path, params={"limit": "2"} | after)
        assert (status, page["first_id"], page["last_id"]) == (
            200,
            page["data"][0]["id"],
            page["data"][-1]["id"],
        )
        seen += [item["content"][0]["text"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == ["4", "3", "2", "1", "0"]
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "none"}):
        assert (await live.get(path, params=query))[0] == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [CLOCK, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
        ({"tools": [CLOCK | {"strict": True, "parameters": {"not": {}}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 2**40}, "max_output_tokens"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "watch"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"input": []}, "input"),
        ({"input": ""}, None),
        ({"input": [5]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "input[0].call_id"),
        ({"input": "x" * 50_000}, "input"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(serve, fields, param):
    live = await serve(engine=hermes(say("ok")))
    if param is None:
        await respond(live, fields["input"])
        return
    error = await refusal(live, 400, **fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.partition("[")[0].partition(".")[0] in error["message"]
    assert (await respond(live))["status"] == "completed"


async def test_harmless_fields_are_taken(serve):
    live = await serve(engine=hermes(say("ok")))
    await respond(
        live,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False},
        text={"format": {"type": "text"}, "verbosity": "low"},
        reasoning={"effort": "none", "summary": "auto"},
        top_k=5,
        seed=7,
    )
    assert prompt_text(live.engine).endswith("<think>\n\n</think>\n\n")
    assert (live.engine.made[0].params.top_k, live.engine.made[0].params.seed) == (5, 7)


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_aborts(serve, stream):
    live = await serve(babble, step_seconds=0.01)
    pending = live.session.post(live.url + RESPONSES, json={"input": "Hi", "stream": stream})
    if stream:
        response = await pending
        await response.content.readline()
        await eventually(lambda: bool(live.thread.running))
        response.close()
    else:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pending, 0.2)
    await eventually(lambda: not live.thread.running and not live.thread.waiting)
    assert live.engine.stats.finished == {"abort": 1}


async def test_failures_are_told(serve):
    live = await serve(babble, step_seconds=0.005)
    live.thread.fault = "the device was lost"
    events = await stream_events(live, RESPONSES, {"input": "Hi"})
    EVENT.validate_python(events[-1], strict=True)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the device was lost"}
    error = await refusal(live, 500)
    assert "the device was lost" in error["message"]


async def test_wrong_model_and_broken_json(serve):
    live = await serve(say("ok"))
    assert (await refusal(live, 404, model="other"))["code"] == "model_not_found"
    status, answer = await live.post(RESPONSES, b'{"input": ')
    assert (status, answer["error"]["code"]) == (400, "invalid_json")
    assert (await live.post(RESPONSES, {}))[1]["error"]["param"] == "input"
    bare = await serve(engine=FakeEngine(say("x"), template=False))
    assert (await refusal(bare, 400))["param"] == "input"
