"""Tool calls that must be made, strict functions, and reasoning in front of a form."""

from __future__ import annotations

import pytest

from helpers.byte_tokenizer import VOCAB_SIZE
from helpers.fake_engine import say
from helpers.live_server import CHAT, MESSAGES
from helpers.tool_calls import CITY, CLOCK, TOOLS, City, calls_of, hermes, llama3, tool, written

pytestmark = pytest.mark.asyncio


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
