"""Answers that are held to a form: over every protocol, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import anthropic
import openai
import pytest

from helpers.batch_client import create, finished, jsonl, line, lines_of
from helpers.fake_engine import say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live
from helpers.tiny_text_model import write_tiny_text_model
from helpers.tool_calls import CITY, CLOCK, City, hermes, tool
from tierax.engine.config import EngineConfig
from tierax.engine.engine import Engine

pytestmark = pytest.mark.asyncio


NOT = {"not": {"type": "string"}}


def options(live: Live) -> dict[str, Any]:
    return {"base_url": f"{live.url}/v1", "api_key": "-", "max_retries": 0, "timeout": 10}


# --- clients


async def test_openai_parse(serve):
    live = await serve(say(CITY))
    async with openai.AsyncOpenAI(**options(live)) as client:
        messages: Any = MESSAGES
        answer = await client.chat.completions.parse(model="fake", messages=messages, response_format=City)
        assert answer.choices[0].message.parsed == City(name="Köln", people=1085664)
        response = await client.responses.parse(model="fake", input="Hi", text_format=City)
        assert response.output_parsed == City(name="Köln", people=1085664)
        async with client.chat.completions.stream(
            model="fake", messages=messages, response_format=City
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == City(name="Köln", people=1085664)
    assert all(request.params.constraint is not None for request in live.engine.made)


async def test_a_model_that_says_something_else_is_held_to_the_form(serve):
    live = await serve(say("I would rather chat."))
    async with openai.AsyncOpenAI(**options(live)) as client:
        messages: Any = MESSAGES
        answer = await client.chat.completions.parse(model="fake", messages=messages, response_format=City)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.parsed is not None


async def test_openai_parses_tools(serve):
    live = await serve(engine=hermes(f'<tool_call>\n{{"name": "City", "arguments": {CITY}}}\n</tool_call>'))
    async with openai.AsyncOpenAI(**options(live)) as client:
        messages: Any = MESSAGES
        asked: dict[str, Any] = {"model": "fake", "messages": messages}
        tools = [openai.pydantic_function_tool(City)]
        choices: list[Any] = ["auto", "required", {"type": "function", "function": {"name": "City"}}]
        for choice in choices:
            answer = await client.chat.completions.parse(**asked, tools=tools, tool_choice=choice)
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.function.parsed_arguments == City(name="Köln", people=1085664)


async def test_anthropic_output_format_and_tools(serve):
    live = await serve(engine=hermes("No."))
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="-", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 200, "messages": MESSAGES}
        form = {"type": "json_schema", "schema": City.model_json_schema()}
        for fields in ({"output_format": form}, {"output_config": {"format": form}}):
            answer = await client.messages.create(**asked, extra_body=fields)
            (block,) = answer.content
            assert block.type == "text"
            City.model_validate_json(block.text)
        tools: Any = [
            {"name": "f", "input_schema": {"type": "object"}},
            {"name": "city", "input_schema": City.model_json_schema()},
        ]
        choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "city"}]
        for choice in choices:
            answer = await client.messages.create(**asked, tools=tools, tool_choice=choice)
            assert answer.stop_reason == "tool_use"
            blocks = [block for block in answer.content if block.type == "tool_use"]
            assert len(blocks) == 1
            if "name" in choice:
                City.model_validate(blocks[0].input)


async def test_other_protocols(serve):
    live = await serve(say("No."))
    text = {"format": {"type": "json_schema", "name": "c", "schema": City.model_json_schema()}}
    _, answer = await live.post("/v1/responses", {"input": "Hi", "text": text})
    City.model_validate_json(answer["output"][0]["content"][0]["text"])
    assert answer["text"]["format"]["name"] == "c"
    _, answer = await live.post("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_object"}}})
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {}
    for fields, text in (
        ({"regex": "[0-9]{4}"}, "0000"),
        ({"ebnf": 'root ::= "a" | "b"'}, "a"),
        ({"json_schema": '{"const": 5}'}, "5"),
    ):
        _, answer = await live.post("/generate", {"text": "Hi", "sampling_params": fields | {"n": 2}})
        assert [one["text"] for one in answer] == [text] * 2


async def test_lines_of_a_batch(serve):
    live = await serve(say("7"))
    lines = [line("held", regex="[0-9]"), line("bad", regex="[a-"), line("free")]
    batch = await finished(live, (await create(live, jsonl(lines)))["id"])
    (told,) = await lines_of(live, batch["error_file_id"])
    assert (told["custom_id"], told["response"]["body"]["error"]["param"]) == ("bad", "regex")
    texts = {
        x["custom_id"]: x["response"]["body"]["choices"][0]["text"]
        for x in await lines_of(live, batch["output_file_id"])
    }
    assert texts == {"held": "7", "free": "7"}


async def test_a_real_engine_with_a_random_model(serve, tmp_path):
    """A model that knows nothing keeps to every form, and what is beside it in the batch is left as it was."""
    write_tiny_text_model(tmp_path / "model")
    options = {"max_num_seqs": 4, "skip_warmup": True, "host_cache_size": 0, "context_length": 512}
    live = await serve(engine=Engine(EngineConfig.create(str(tmp_path / "model"), **options)))
    schema = {
        "type": "object",
        "properties": {
            "a": {"enum": [1, 22]},
            "b": {"type": "string", "maxLength": 5},
            "c": {"type": "boolean"},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    alone = await live.complete(max_tokens=30, seed=3)
    jumped = 0
    for logprobs in (False, True):
        held = live.chat(response_format=form, n=3, logprobs=logprobs, max_tokens=200, seed=3)
        answer, beside = await asyncio.gather(held, live.complete(max_tokens=30, seed=3))
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            found = json.loads(choice["message"]["content"])
            assert list(found) == ["a", "b", "c"]
            assert found["a"] in (1, 22)
            assert len(found["b"]) <= 5
        assert beside["choices"][0]["text"] == alone["choices"][0]["text"]
        # Every token of an answer with log-probs is sampled.
        seen = await live.metrics()
        assert (seen["tierax_jumped_tokens_total"] > jumped) != logprobs
        jumped = seen["tierax_jumped_tokens_total"]
    assert seen["tierax_constrained_tokens_total"] >= 6 * 20


# --- refusals


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": NOT}}}, "response_format", "not"),
        ({"guided_json": {"properties": {"a": {"uniqueItems": True}}}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"$ref": "https://example.org/x"}}, "guided_json", "$ref"),
        ({"guided_json": {"type": "nope"}}, "guided_json", "type"),
        ({"guided_json": {"type": "string", "pattern": "^(a)\\1$"}}, "guided_json", "pattern"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"structured_outputs": {"json": NOT}}, "structured_outputs.json", "not"),
        ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs.regex", "regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "choice"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "grammar"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "structured_outputs.json and"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "response_format and regex"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format", "triggers"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "<f>"}], "triggers": ["<g"]}},
            "response_format",
            "trigger",
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "or"}}}, "response_format", "'or'"),
        ({"regex": "a" * 600_000}, "regex", "characters"),
    ],
)  # fmt: skip
async def test_what_cannot_be_enforced_is_refused(serve, fields, param, words):
    live = await serve(say("x"))
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hi"})):
        status, answer = await live.post(path, prompt | fields)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert words in answer["error"]["message"]
    assert live.engine.made == []


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [tool("f", True, properties={"a": NOT})]}, "tools[0].function.parameters", "not"),
        (
            {"tools": [CLOCK, tool("f", properties={"a": NOT})], "tool_choice": "required"},
            "tools[1].function.parameters",
            "not",
        ),
        (
            {"tools": [tool("f", True)], "structured_outputs": {"grammar": 'start: "a"'}},
            "structured_outputs.grammar",
            "tools",
        ),
    ],
)
async def test_tools_that_cannot_be_enforced_are_refused(serve, fields, param, words):
    live = await serve(engine=hermes("x"))
    status, answer = await live.post(CHAT, {"messages": MESSAGES} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert words in answer["error"]["message"]
    assert live.engine.made == []


async def test_a_malformed_form_costs_its_own_call_only(serve):
    live = await serve(say("5"))
    good, bad = {"regex": "[0-9]"}, {"regex": "[a-"}
    worse = {"guided_json": {"type": "nope"}}
    statuses = [
        (await live.post(COMPLETIONS, {"prompt": "Hi"} | fields))[0] for fields in (good, bad, worse, good)
    ]
    assert statuses == [200, 400, 400, 200]
    assert (await live.get("/health"))[0] == 200


async def test_a_slow_grammar_does_not_keep_others_waiting(serve):
    live = await serve(say("5"))
    compile, gate = live.engine.compile_constraint, threading.Event()

    def slow(constraint: Any) -> Any:
        assert gate.wait(10)
        return compile(constraint)

    live.engine.compile_constraint = slow
    held = [asyncio.create_task(live.complete(regex="[0-9]")) for _ in range(4)]
    await asyncio.sleep(0.05)
    assert (await live.complete(max_tokens=1))["usage"]["completion_tokens"] == 1
    assert not any(task.done() for task in held)
    gate.set()
    assert [(await task)["choices"][0]["text"] for task in held] == ["5"] * 4


async def test_metrics(serve):
    live = await serve(say("5"))
    await live.complete(regex="[0-9]")
    await live.post(COMPLETIONS, {"prompt": "Hi", "regex": "[a-"})
    await live.complete()
    seen = await live.metrics()
    assert seen['tierax_constrained_calls_total{kind="regex"}'] == 1
    assert seen['tierax_constraints_refused_total{kind="regex"}'] == 1
    assert seen["tierax_constraint_compile_seconds_count"] == 2
    assert {"tierax_mask_seconds_total", "tierax_masks_total", "tierax_jumped_tokens_total"} <= seen.keys()
