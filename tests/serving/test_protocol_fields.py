"""Every field of chat and completions bodies, one by one: it has its effect, or is refused by name.

Whatever a field does, a stream says the same as a whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from helpers.byte_tokenizer import EOS, IM_START
from helpers.chat_templates import HERMES_TEMPLATE
from helpers.fake_engine import FakeEngine, babble
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live
from helpers.streams import TOOL, comparable, put_together
from tierax.engine.request import Request
from tierax.serving.openai.bodies import ChatBody, CompletionBody

pytestmark = pytest.mark.asyncio

BOTH = (CHAT, COMPLETIONS)
WRITTEN = {
    "stop": "bé🙂",
    "think": "<think>why</think>so",
    "call": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
}


def script(request: Request, index: int) -> list[int]:
    """What the prompt asks for: an echo of the seed's letters, or one of `WRITTEN` by its name in the prompt. Nothing, where
    the answer has a form: the fake engine then goes the shortest way."""
    if request.params.constraint is not None:
        return []
    prompt = bytes(token for token in request.tokens[: request.num_prompt] if token < 256).decode()
    for name, text in WRITTEN.items():
        if f"say {name}" in prompt:
            return [*text.encode(), IM_START, EOS]
    letters = babble(request, index)
    return [*(next(letters) for _ in range(6)), *"é🙂".encode(), EOS, *(next(letters) for _ in range(99))]


def made(live: Live) -> Request:
    return live.engine.made[0]


def param(name: str, value: Any) -> Callable[[Live, dict[str, Any]], bool]:
    """The engine was asked for this."""
    return lambda live, _: getattr(made(live).params, name) == value


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    choice = answer["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def prompt_text(live: Live) -> str:
    request = made(live)
    return live.engine.tokenizer.decode(request.tokens[: request.num_prompt], skip_special_tokens=False)


def says(text: str) -> Callable[[Live, dict[str, Any]], bool]:
    """The answer is this."""
    return lambda _, answer: text_of(answer) == text


def called(answer: dict[str, Any]) -> tuple[str, Any]:
    """Name and arguments of the only call."""
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
FORMS: list[tuple[str, Any, str]] = [
    ("response_format", {"type": "json_object"}, "{}"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, '{"a":0}'),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        '{"a":0}',
    ),
    ("structured_outputs", {"json": SCHEMA}, '{"a":0}'),
    ("structured_outputs", {"json": json.dumps(SCHEMA)}, '{"a":0}'),
    ("structured_outputs", {"regex": "[0-9]{3}"}, "000"),
    ("structured_outputs", {"choice": ["yes", "no"]}, "no"),
    ("structured_outputs", {"grammar": 'start: "4" "2"'}, "42"),
    ("structured_outputs", {"json_object": True}, "{}"),
    ("guided_json", SCHEMA, '{"a":0}'),
    ("guided_regex", "[0-9]{3}", "000"),
    ("guided_choice", ["yes", "no"], "no"),
    ("guided_grammar", 'root ::= "4" "2"', "42"),
    ("json_schema", json.dumps(SCHEMA), '{"a":0}'),
    ("regex", "[0-9]{3}", "000"),
    ("ebnf", 'root ::= "4" "2"', "42"),
]
"""Field, value and what the script's engine then says: it gets to the end of what it may."""

Seen = Callable[[Live, dict[str, Any]], bool]
ROWS: list[tuple[tuple[str, ...], dict[str, Any], Seen]] = [
    (BOTH, {"model": "fake"}, lambda _, answer: answer["model"] == "fake"),
    (BOTH, {"max_tokens": 3}, lambda _, answer: answer["usage"]["completion_tokens"] == 3),
    ((CHAT,), {"max_completion_tokens": 3}, lambda _, answer: answer["usage"]["completion_tokens"] == 3),
    (BOTH, {"temperature": 0.5}, param("temperature", 0.5)),
    (BOTH, {"temperature": 0}, param("temperature", 0)),
    (BOTH, {"top_p": 0.5}, param("top_p", 0.5)),
    (BOTH, {"top_k": 7}, param("top_k", 7)),
    (BOTH, {"min_p": 0.25}, param("min_p", 0.25)),
    (BOTH, {"frequency_penalty": 1.5}, param("frequency_penalty", 1.5)),
    (BOTH, {"presence_penalty": -1.5}, param("presence_penalty", -1.5)),
    (BOTH, {"repetition_penalty": 1.25}, param("repetition_penalty", 1.25)),
    (BOTH, {"logit_bias": {"65": -100, "66": 2}}, param("logit_bias", {65: -100.0, 66: 2.0})),
    (BOTH, {"seed": -5}, lambda live, _: made(live).seed == (-5) % 2**63),
    (BOTH, {"n": 3}, lambda _, answer: len({text_of(answer, i) for i in range(3)}) == 3),
    (BOTH, {"stop": "é"}, lambda _, answer: len(text_of(answer)) == 6),
    (BOTH, {"stop": ["🙂", "zzz"]}, lambda _, answer: text_of(answer).endswith("é")),
    (
        BOTH,
        {"stop": "é", "include_stop_str_in_output": True},
        lambda _, answer: text_of(answer).endswith("é"),
    ),
    (BOTH, {"stop_token_ids": [0xC3]}, lambda live, _: 0xC3 in made(live).stop_ids),
    (BOTH, {"min_tokens": 4}, param("min_tokens", 4)),
    (
        BOTH,
        {"ignore_eos": True, "max_tokens": 40},
        lambda _, answer: answer["usage"]["completion_tokens"] == 40,
    ),
    (
        BOTH,
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 14},
        lambda _, answer: "<|eos|>" in text_of(answer),
    ),
    (BOTH, {"cache_salt": "s"}, lambda live, _: b"salt" in made(live).namespace),
    (
        BOTH,
        {"prefetch_policy": "timeout=25ms"},
        lambda live, _: str(made(live).prefetch) != str(None) and made(live).prefetch is not None,
    ),
    (BOTH, {"priority": -3}, lambda live, _: made(live).priority == -3),
    (BOTH, {"return_token_ids": True}, lambda _, answer: len(answer["choices"][0]["token_ids"]) == 13),
    (BOTH, {"truncate_prompt_tokens": 2}, lambda _, answer: answer["usage"]["prompt_tokens"] == 2),
    ((CHAT,), {"prompt_logprobs": 1}, lambda _, answer: answer["prompt_logprobs"][0] is None),
    (
        (COMPLETIONS,),
        {"prompt_logprobs": 1},
        lambda _, answer: len(answer["choices"][0]["prompt_logprobs"]) == 3,
    ),
    (
        (CHAT,),
        {"logprobs": True},
        lambda _, answer: answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == [],
    ),
    (
        (CHAT,),
        {"logprobs": True, "top_logprobs": 2},
        lambda _, answer: len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2,
    ),
    (
        (COMPLETIONS,),
        {"logprobs": 2},
        lambda _, answer: len(answer["choices"][0]["logprobs"]["tokens"]) == 12,
    ),
    ((COMPLETIONS,), {"echo": True}, lambda _, answer: text_of(answer).startswith("Hi")),
    (
        (COMPLETIONS,),
        {"echo": True, "logprobs": 1},
        lambda _, answer: answer["choices"][0]["logprobs"]["token_logprobs"][0] is None,
    ),
    (
        (COMPLETIONS,),
        {"prompt": [72, 105]},
        lambda live, _: list(made(live).tokens[:2]) == [72, 105],
    ),
    ((COMPLETIONS,), {"prompt": ["a", "b"]}, lambda _, answer: len(answer["choices"]) == 2),
    ((COMPLETIONS,), {"prompt": [[65], [66, 67]]}, lambda _, answer: answer["usage"]["prompt_tokens"] == 3),
    ((COMPLETIONS,), {"best_of": 1}, lambda _, answer: len(answer["choices"]) == 1),
    ((COMPLETIONS,), {"add_special_tokens": False}, lambda live, _: prompt_text(live) == "Hi"),
    ((COMPLETIONS,), {"add_special_tokens": True}, lambda live, _: prompt_text(live) == "<|bos|>Hi"),
    ((CHAT,), {"add_generation_prompt": False}, lambda live, _: prompt_text(live).endswith("<|im_end|>\n")),
    (
        (CHAT,),
        {"messages": [*MESSAGES, {"role": "assistant", "content": "We"}], "continue_final_message": True},
        lambda live, _: prompt_text(live).endswith("assistant\nWe"),
    ),
    (
        (CHAT,),
        {"chat_template_kwargs": {"enable_thinking": False}},
        lambda live, _: "</think>" in prompt_text(live),
    ),
    ((CHAT,), {"reasoning_effort": "none"}, lambda live, _: "</think>" in prompt_text(live)),
    (
        (CHAT,),
        {"messages": [{"role": "user", "content": "say think"}]},
        lambda _, answer: answer["choices"][0]["message"]["reasoning_content"] == "why",
    ),
    (
        (CHAT,),
        {"messages": [{"role": "user", "content": "say think"}], "separate_reasoning": False},
        lambda _, answer: text_of(answer) == WRITTEN["think"],
    ),
    (
        (CHAT,),
        {"messages": [{"role": "user", "content": "say call"}], "tools": [TOOL]},
        lambda _, answer: answer["choices"][0]["finish_reason"] == "tool_calls",
    ),
    (
        (CHAT,),
        {"messages": [{"role": "user", "content": "say call"}], "tools": [TOOL], "tool_choice": "none"},
        lambda _, answer: text_of(answer) == WRITTEN["call"],
    ),
    (
        (CHAT,),
        {
            "messages": [{"role": "user", "content": "say call"}],
            "tools": [TOOL],
            "parallel_tool_calls": False,
        },
        lambda _, answer: len(answer["choices"][0]["message"]["tool_calls"]) == 1,
    ),
    (
        (CHAT,),
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Be"}]}, *MESSAGES]},
        lambda live, _: "system\nBe" in prompt_text(live),
    ),
    ((CHAT,), {"tools": [TOOL], "tool_choice": "required"}, lambda _, answer: called(answer) == ("f", {})),
    (
        (CHAT,),
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        lambda _, answer: called(answer) == ("f", {}),
    ),
    *((BOTH, {name: value}, says(text)) for name, value, text in FORMS),
    *(
        # Say nothing that would change an answer here.
        ((CHAT,), {name: value}, lambda _, answer: len(text_of(answer)) == 8)
        for name, value in {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "verbosity": "low",
        }.items()
    ),
    *(
        (BOTH, {name: None}, lambda _, answer: len(text_of(answer)) == 8)
        for name in ("functions", "response_format", "guided_json", "temperature", "stop", "n", "top_k")
    ),
]
SHOWN_ELSEWHERE = {"stream": "each row is streamed too", "stream_options": "so are its two fields"}
"""Fields without a row, and why."""

REFUSED: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (BOTH, {"functions": [{"name": "f"}]}),
    (BOTH, {"function_call": {"name": "f"}}),
    (BOTH, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}),
    (BOTH, {"guided_json": {}, "guided_regex": "a"}),
    (BOTH, {"guided_regex": "(a)\\1"}),
    (BOTH, {"guided_choice": []}),
    (BOTH, {"guided_grammar": "start: nowhere"}),
    (BOTH, {"guided_whitespace_pattern": "x"}),
    (BOTH, {"json_schema": {"not": {}}}),
    (BOTH, {"regex": ""}),
    (BOTH, {"regex": "[a-"}),
    (BOTH, {"ebnf": "root ::="}),
    (BOTH, {"structural_tag": {"structures": []}}),
    (BOTH, {"modalities": ["audio"]}),
    (BOTH, {"audio": {"voice": "x"}}),
    (BOTH, {"web_search_options": {"a": 1}}),
    (BOTH, {"suffix": "x"}),
    (BOTH, {"use_beam_search": True}),
    (BOTH, {"logits_processors": ["x"]}),
    ((CHAT,), {"tool_choice": "required"}),
    ((CHAT,), {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ((CHAT,), {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ((CHAT,), {"store": True}),
    ((CHAT,), {"reasoning_effort": "endless"}),
    ((CHAT,), {"service_tier": "cheapest"}),
    ((COMPLETIONS,), {"best_of": 0}),
]


def fresh() -> FakeEngine:
    return FakeEngine(script, template=HERMES_TEMPLATE, add_bos=True, context_length=512)


def fields_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A whole body: the row's fields, a seed so that answers repeat, and room for the whole answer."""
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    return prompt | {"seed": 1} | ({"max_tokens": 120} if path == COMPLETIONS else {}) | fields


def each(rows: list[Any]) -> list[Any]:
    return [
        pytest.param(path, *row[1:], id=f"{path[4:8]}-{'+'.join(row[1])}") for row in rows for path in row[0]
    ]


@pytest.mark.parametrize(("path", "fields", "seen"), each(ROWS))
async def test_a_field_has_its_effect_streamed_or_not(serve, path, fields, seen):
    live = await serve(engine=fresh())
    status, answer = await live.post(path, fields_of(path, fields))
    assert status == 200, answer
    assert seen(live, answer), answer["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = await live.stream(path, **fields_of(path, fields), **options)
    streamed = put_together(chunks)
    assert streamed == {choice["index"]: comparable(choice) for choice in answer["choices"]}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in counts] == [answer["usage"][name] for name in counts]
    assert {(chunk["model"], chunk["object"].removesuffix(".chunk")) for chunk in chunks} == {
        (answer["model"], answer["object"])
    }
    prompts = [choice.get("prompt_logprobs") for chunk in chunks for choice in chunk["choices"]]
    if path == CHAT:
        assert next((told for told in prompts if told), None) == answer.get("prompt_logprobs")


@pytest.mark.parametrize(("path", "fields"), each(REFUSED))
async def test_a_field_that_cannot_be_honoured_is_refused_by_name(serve, path, fields):
    live = await serve(engine=fresh())
    for streamed in (False, True):
        status, answer = await live.post(path, fields_of(path, fields) | {"stream": streamed})
        assert status == 400, answer
        assert answer["error"]["param"] in fields
        assert answer["error"]["param"] in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
    assert live.engine.made == []


@pytest.mark.parametrize(("path", "body"), [(CHAT, ChatBody), (COMPLETIONS, CompletionBody)])
async def test_no_field_is_without_a_row(path, body):
    covered = {name for paths, fields, *_ in [*ROWS, *REFUSED] if path in paths for name in fields}
    missing = set(body.__struct_fields__) - covered - {"messages", "prompt"} - SHOWN_ELSEWHERE.keys()
    assert not missing, f"add rows for {', '.join(sorted(missing))} of {path} to ROWS or REFUSED"


@pytest.mark.parametrize("path", BOTH)
async def test_unknown_fields_are_ignored_with_one_debug_line(serve, path, caplog):
    live = await serve(engine=fresh())
    with caplog.at_level("DEBUG", logger="tierax.serving"):
        status, _ = await live.post(path, fields_of(path, {"best": "secret words", "zz": {"n": 1}}))
    assert status == 200
    lines = [record for record in caplog.records if "ignored" in record.getMessage()]
    assert [(line.levelname, line.getMessage()) for line in lines] == [("DEBUG", "fields ignored: best, zz")]
    assert "secret words" not in caplog.text
