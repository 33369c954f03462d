"""Answers that are held to a form: over every protocol, with tools and reasoning, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from helpers.batch_client import create, finished, jsonl, line, lines_of
from helpers.byte_tokenizer import VOCAB_SIZE
from helpers.chat_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live
from helpers.tiny_text_model import write_tiny_text_model
from tierax.engine.config import EngineConfig
from tierax.engine.engine import Engine

pytestmark = pytest.mark.asyncio


class City(BaseModel):
    name: str
    people: int


NOT = {"not": {"type": "string"}}
CITY = '{"name":"Köln","people":1085664}'


def tool(name: str, strict: bool | None = None, **parameters: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if parameters:
        function["parameters"] = {"type": "object", "additionalProperties": False, **parameters}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


WEATHER = tool("weather", properties={"city": {"type": "string"}}, required=["city"])
CLOCK = tool("clock")
TOOLS = [WEATHER, CLOCK]


def hermes(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(say(text), template=HERMES_TEMPLATE, **options)


def llama3(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(say(text), template=LLAMA3_TEMPLATE, **options)


def options(live: Live) -> dict[str, Any]:
    return {"base_url": f"{live.url}/v1", "api_key": "-", "max_retries": 0, "timeout": 10}


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    told = answer["choices"][0]["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in told]


def written(live: Live) -> str:
    """What the model wrote in its last answer."""
    request = live.engine.made[-1]
    return live.engine.tokenizer.decode(request.tokens[request.num_prompt :])


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


# --- tools


async def test_required_makes_a_call(serve):
    live = await serve(engine=hermes("I would rather chat."))
    answer = await live.chat(tools=TOOLS, tool_choice="required")
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["message"]["content"] is None
    assert calls_of(answer) in ([("weather", {"city": ""})], [("clock", {})])
    # Whatever the model has to say goes into the arguments.
    live.engine.script = say('<tool_call>\n{"name": "weather", "arguments": {"city":"Ulm", "x": 5}}')
    assert calls_of(await live.chat(tools=TOOLS, tool_choice="required")) == [("weather", {"city": "Ulm"})]


@pytest.mark.parametrize("make", [hermes, llama3])
async def test_a_named_function_is_called_once(serve, make):
    live = await serve(engine=make("Nothing."))
    choice = {"type": "function", "function": {"name": "clock"}}
    answer = await live.chat(tools=TOOLS, tool_choice=choice)
    assert calls_of(answer) == [("clock", {})]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    chunks = await live.stream(CHAT, tools=TOOLS, tool_choice=choice, n=2)
    named = [
        call["function"]["name"]
        for chunk in chunks
        for told in chunk["choices"]
        for call in told["delta"].get("tool_calls", [])
        if "id" in call
    ]
    assert named == ["clock", "clock"]


@pytest.mark.parametrize(
    ("make", "one", "between"),
    [
        (hermes, '<tool_call>\n{"name": "weather", "arguments": {"city":"Ulm"}}\n</tool_call>', "\n"),
        (llama3, '{"name": "weather", "parameters": {"city":"Ulm"}}', "; "),
    ],
)
async def test_parallel_calls(serve, make, one, between):
    live = await serve(engine=make(one + between + one + "no more"))
    call = ("weather", {"city": "Ulm"})
    assert calls_of(await live.chat(tools=TOOLS, tool_choice="required")) == [call] * 2
    answer = await live.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert calls_of(answer) == [call]
    assert written(live).startswith(one)
    assert written(live).count("weather") == 1


@pytest.mark.parametrize("make", [hermes, llama3])
async def test_allowed_tools(serve, make):
    live = await serve(engine=make('{"name": "weather"'))
    for mode in ("auto", "required"):
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
        answer = await live.chat(tools=TOOLS, tool_choice=allowed)
        if mode == "required" or make is llama3:
            assert calls_of(answer) == [("clock", {})]


async def test_a_strict_function_is_held_to_its_schema_once_its_call_has_begun(serve):
    strict = tool("weather", True, properties={"city": {"type": "string"}}, required=["city"])
    live = await serve(engine=hermes("Just text with <tool_ and such."))
    answer = await live.chat(tools=[strict, CLOCK])
    assert answer["choices"][0]["message"]["content"] == "Just text with <tool_ and such."
    live.engine.script = say('Well. <tool_call>\n{"name": "weather", "arguments": {"town": 5}}\n</tool_call>')
    answer = await live.chat(tools=[strict, CLOCK])
    assert answer["choices"][0]["message"]["content"] == "Well."
    assert [(name, set(arguments)) for name, arguments in calls_of(answer)] == [("weather", {"city"})]
    # One that is not strict may have any arguments.
    live.engine.script = say('<tool_call>\n{"name": "clock", "arguments": {"zone": [1]}}\n</tool_call> Bye.')
    answer = await live.chat(tools=[strict, CLOCK])
    assert calls_of(answer) == [("clock", {"zone": [1]})]
    assert answer["choices"][0]["message"]["content"] == " Bye."
    live.engine.script = say("<tool_call>what?</tool_call>")
    assert len(calls_of(await live.chat(tools=[strict, CLOCK]))) == 1


async def test_a_strict_function_of_llama_3(serve):
    strict = tool("weather", True, properties={"city": {"type": "string"}}, required=["city"])
    live = await serve(engine=llama3("Only text {}"))
    answer = await live.chat(tools=[strict, CLOCK])
    assert answer["choices"][0]["message"]["content"] == "Only text {}"
    for text in ('{"name": "weather", "parameters": {"town"', 'So <|python_tag|>{"name": "weather"'):
        live.engine.script = say(text)
        answer = await live.chat(tools=[strict, CLOCK])
        assert [(name, set(arguments)) for name, arguments in calls_of(answer)] == [("weather", {"city"})]


async def test_a_tag_that_is_a_special_token_is_written_as_one(serve):
    specials = ("<tool_call>", "</tool_call>")
    live = await serve(engine=hermes("", more_specials=specials))
    live.engine.script = lambda request, index: [VOCAB_SIZE]
    assert calls_of(await live.chat(tools=[CLOCK], tool_choice="required")) == [("clock", {})]
    made = live.engine.made[-1]
    assert made.tokens[made.num_prompt] == VOCAB_SIZE
    strict = tool("clock", True)
    live.engine.script = lambda request, index: [*b"Now ", VOCAB_SIZE, *b"!"]
    answer = await live.chat(tools=[strict])
    assert calls_of(answer) == [("clock", {})]
    assert answer["choices"][0]["message"]["content"] == "Now"


async def test_a_form_beside_tools_leaves_room_for_calls(serve):
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": City.model_json_schema()}}
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    for make, said in ((hermes, call), (llama3, '{"name": "clock", "parameters": {}}')):
        live = await serve(engine=make(said))
        answer = await live.chat(tools=TOOLS, response_format=form)
        assert calls_of(answer) == [("clock", {})]
        live.engine.script = say(CITY)
        answer = await live.chat(tools=TOOLS, response_format=form)
        assert answer["choices"][0]["message"]["content"] == CITY
        live.engine.script = say("Neither.")
        answer = await live.chat(tools=TOOLS, response_format=form)
        assert calls_of(answer) or City.model_validate_json(answer["choices"][0]["message"]["content"])


# --- reasoning


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("fields", [{"regex": "[0-9]+!"}, {"tools": TOOLS, "tool_choice": "required"}])
async def test_reasoning_comes_before_the_form(serve, opened, fields):
    thought = ("" if opened else "<think>\n") + 'Is it 42? "{ maybe\n</think>\n\n'
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    live = await serve(engine=hermes(thought + ("42!" if "regex" in fields else call)))
    answer = await live.chat(**fields, chat_template_kwargs={"opens_thinking": opened})
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == 'Is it 42? "{ maybe'
    assert message["content"] == "42!" or calls_of(answer) == [("clock", {})]
    if not opened:
        live.engine.script = say("")
        answer = await live.chat(**fields)
        assert "reasoning_content" not in answer["choices"][0]["message"]


async def test_a_prompt_that_has_closed_the_reasoning_leaves_none(serve):
    live = await serve(engine=hermes("<think>x</think>7"))
    answer = await live.chat(regex="<?[0-9]", chat_template_kwargs={"enable_thinking": False})
    assert answer["choices"][0]["message"]["content"] == "<0"


async def test_a_grammar_has_no_room_for_reasoning_that_has_begun(serve):
    live = await serve(engine=hermes("x"))
    fields = {"messages": MESSAGES, "ebnf": 'root ::= "a"'}
    status, answer = await live.post(CHAT, fields | {"chat_template_kwargs": {"opens_thinking": True}})
    assert (status, answer["error"]["param"]) == (400, "ebnf")
    assert (await live.chat(**fields))["choices"][0]["message"]["content"] == "a"


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
