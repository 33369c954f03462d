"""Parsers of reasoning and tool calls: what a text means, however it was cut into pieces."""

from __future__ import annotations

import itertools
import json
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chat_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE
from tierax.serving.parsers.choose import CallStyle, make_parser, output_style
from tierax.serving.parsers.json_object import read_json
from tierax.serving.parsers.parts import (
    Answer,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolCallArguments,
    parse_whole,
)
from tierax.serving.parsers.tools import FORMATS, ToolParser

NAMES = frozenset({"f", "weather"})
STYLES = {
    "hermes": CallStyle(True, FORMATS["hermes"], names=NAMES),
    "llama3": CallStyle(False, FORMATS["llama3"], names=NAMES),
    "thinking": CallStyle(True, None, in_reasoning=True),
    "both": CallStyle(True, FORMATS["llama3"], names=NAMES),
    "one call": CallStyle(False, FORMATS["hermes"], names=NAMES, parallel=False),
}


def parse(style: CallStyle, pieces: list[str]) -> list[Part]:
    """All parts, with neighbours of one kind joined."""
    numbers = itertools.count()
    parser = make_parser(style, lambda: f"call_{next(numbers)}")
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, ToolCallArguments) and isinstance(last, ToolCallArguments):
            joined[-1] = ToolCallArguments(last.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


def answer(style: str, text: str) -> Answer:
    """What a text is, read at once and character by character."""
    numbers = itertools.count()
    whole = parse_whole(make_parser(STYLES[style], lambda: f"call_{next(numbers)}"), text)
    if len(text) < 10_000:
        piecewise = Answer()
        piecewise.add(parse(STYLES[style], list(text)))
        assert piecewise == whole
    return whole


FRAGMENTS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        ";",
        "<",
        "</",
        "<tool_",
        "<|py",
    ),
    *("\n", " ", "a", "🙂", "{", "}", "[", "]", '"', "\\", ",", ":", "1", "\u2028"),
    *(
        '{"name": "f", "arguments": {"a": "}<tool_call>\\""}}',
        '{"name": "weather", "parameters": {}}',
        '{"name"',
    ),
    *('{"name": "g", "arguments": {}}', '{"name": "f"}', "Hello there", '{"a": 1}'),
)


@settings(max_examples=200, deadline=None)
@given(
    style=st.sampled_from(sorted(STYLES)),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_the_parts_do_not_depend_on_the_cuts(style, text, cuts):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = parse(STYLES[style], [text])
    assert parse(STYLES[style], pieces) == whole
    assert parse(STYLES[style], list(text)) == whole


@settings(max_examples=200, deadline=None)
@given(
    style=st.sampled_from(["hermes", "llama3", "both"]),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
)
def test_without_a_call_every_character_stays(style, text):
    told = answer(style, text)
    if not told.calls and not told.reasoning and "think>" not in text:
        assert told.text == text
    for call in told.calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>\nhm, so\n</think>\n\nYes.", "hm, so", "Yes."),
        ("\n<think>a</think>b", "a", "b"),
        ("<think>\n\n</think>\n\nYes.\n", "", "Yes.\n"),
        ("<think>goes on ", "goes on ", ""),
        ("<think>a </thi", "a </thi", ""),
        ("Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("<thi", "", "<thi"),
        ("<thin ice", "", "<thin ice"),
        (" \n", "", " \n"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_reasoning(text, reasoning, rest):
    told = answer("hermes", text)
    assert (told.reasoning, told.text) == (reasoning, rest)


def test_reasoning_that_the_prompt_has_opened():
    told = answer("thinking", "\nso\n\n</think>\n\nYes.")
    assert (told.reasoning, told.text) == ("so", "Yes.")
    told = answer("thinking", "so")
    assert (told.reasoning, told.text) == ("so", "")


@pytest.mark.parametrize(
    ("style", "text", "rest", "calls"),
    [
        (
            "hermes",
            'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": [1.50, "}\\"</tool_call>"]}}\n</tool_call>\n',
            "Let me look.",
            [("f", '{"a": [1.50, "}\\"</tool_call>"]}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
        ("hermes", '<think>use <tool_call>{"name": "f"}</think><tool_call>{"name": "f"}', "", [("f", "{}")]),
        ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> Done.', " Done.", [("f", "{}")]),
        ("one call", '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}', "", [("f", "{}")]),
        ("llama3", '{"name": "f", "parameters": {"é": "🙂"}}', "", [("f", '{"é": "🙂"}')]),
        ("llama3", '\n{"name": "f", "parameters": {}}; {"name": "weather", "parameters": {"a": 1}}', "",
         [("f", "{}"), ("weather", '{"a": 1}')]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "new", "parameters": {"a": 1}}', "", [("new", '{"a": 1}')]),
        ("llama3", 'I call\n<|python_tag|>{"name": "f", "parameters": {}}', "I call", [("f", "{}")]),
        ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ("llama3", 'I say {"name": "f", "parameters": {}}', 'I say {"name": "f", "parameters": {}}', []),
        ("llama3", '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
    ],
)  # fmt: skip
def test_calls(style, text, rest, calls):
    told = answer(style, text)
    assert told.text == rest
    assert told.calls == [ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]


@pytest.mark.parametrize(
    "inside",
    [
        *(
            "",
            "f",
            "[1]",
            "null",
            "{}",
            '{"name": "f"',
            '{"name": 5}',
            '{"name": ""}',
            '{"name": "f", "arguments": [1]}',
        ),
        *('{"name": "f", "arguments": {"a": 1,}}', "{'name': 'f'}", '{"name": "f", "arguments": {"a": NaN}}'),
        *(
            '{"name": "f", "arguments": "{"}',
            '{"name": "f", "arguments": {"a": "\n"}}',
            '{"name": "f", "arguments": {"a": 1}',
        ),
        *(
            '{"name": "f", "arguments": {"a": "\\ud83d"}}',
            '{"name": "f", "arguments": {"a": "x}}',
            '{"a": ' * 2000,
        ),
    ],
)
def test_what_is_no_call_stays_text(inside):
    for text in (f"So <tool_call>{inside}</tool_call> then", f"<tool_call>\n{inside}"):
        told = answer("hermes", text)
        assert (told.text, told.calls) == (text, [])


def test_a_call_after_a_broken_one_counts():
    broken = '<tool_call>{"name": "f", "arguments": {x}}</tool_call>'
    told = answer("hermes", broken + '<tool_call>{"name": "f"}</tool_call>')
    assert told.text == broken
    assert [call.name for call in told.calls] == ["f"]


def test_text_is_not_held_back_for_long():
    parser = make_parser(STYLES["hermes"])
    assert parser.feed("Hello") == [Text("Hello")]
    assert parser.feed(" <to") == []
    assert parser.feed("y> <") == [Text(" <toy>")]
    assert parser.finish() == [Text(" <")]


def test_long_outputs_take_linear_time():
    long = 50_000
    call = '<tool_call>{"name": "f", "arguments": {"a": "' + "<x\\n" * long + '"}}'
    text = "<think>" + "hm " * long + "</think>" + call
    before = time.process_time()
    told = answer("hermes", text)
    assert len(told.calls[0].arguments) > 4 * long
    assert answer("hermes", "<tool_call>" * long).text == "<tool_call>" * long
    parser = make_parser(STYLES["hermes"])
    for start in range(0, len(text) // 2, 4):
        parser.feed(text[start : start + 4])
    # Quadratic, each of these would take some seconds.
    assert time.process_time() - before < 3


def test_auto_goes_by_the_template():
    def auto(template: str) -> tuple[bool, str | None]:
        style = output_style(template, reasoning_parser="auto", tool_call_parser="auto")
        return style.think, next((name for name, kind in FORMATS.items() if kind is style.tools), None)

    assert auto(HERMES_TEMPLATE) == (True, "hermes")
    assert auto(LLAMA3_TEMPLATE) == (False, "llama3")
    assert auto("{{ messages[0].content }}") == (False, None)
    # Others' markup between the same tags is not taken for JSON.
    assert auto("{{ tools }}<tool_call>\n<function={{ name }}>") == (False, None)
    forced = output_style("", reasoning_parser="think", tool_call_parser="llama3")
    assert forced.think
    assert forced.tools is FORMATS["llama3"]
    off = output_style(HERMES_TEMPLATE, reasoning_parser="none", tool_call_parser="none")
    assert (off.think, off.tools) == (False, None)


def test_numbers_too_large_for_a_float_do_not_undo_a_call():
    arguments = '{"a": 1E999, "b": -47830e25636, "c": 2}'
    parser = ToolParser(FORMATS["hermes"], {"f"}, parallel=True, new_id=lambda: "id")
    answer = parse_whole(parser, f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert answer == Answer("", "", [ToolCall("id", "f", arguments)])
    assert read_json(arguments) == {"a": sys.float_info.max, "b": -sys.float_info.max, "c": 2}
    for text in ("NaN", "[1e999, Infinity]", "{", '"\\ud83d"'):
        with pytest.raises(ValueError):
            read_json(text)
