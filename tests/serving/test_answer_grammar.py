"""Whatever is written at random within a grammar of reasoning, calls and text is read as what it had to be."""

from __future__ import annotations

import importlib
import json
import random
import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from helpers.byte_tokenizer import EOS, IM_END, VOCAB_SIZE, byte_tokenizer
from tierax.engine.constraint import Constraint, ConstraintError
from tierax.engine.grammar import GrammarCompiler
from tierax.engine.tokenizer import Tokenizer
from tierax.serving.core.answer_form import AnswerForm
from tierax.serving.core.answer_grammar import AnswerGrammar
from tierax.serving.core.tool_fields import AUTO, ToolChoice
from tierax.serving.parsers.choose import CallStyle, make_parser
from tierax.serving.parsers.parts import Answer, parse_whole
from tierax.serving.parsers.tools import FORMATS

jsonschema: Any = importlib.import_module("jsonschema")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", 'Q"{}']}, "at": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}  # fmt: skip
FREE = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 3}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "note", "parameters": FREE}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SCHEMAS = {"weather": CITY, "note": FREE, "now": {"type": "object", "maxProperties": 0}}
FORM = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}}, "required": ["name"], "additionalProperties": False}  # fmt: skip
FORMS = {
    "any": None,
    "schema": Constraint.json_schema(FORM),
    "regex": Constraint.regex(r"\d{2,3}[a-c]*?!"),
    "choice": Constraint.choice(["yes", "no", "no {"]),
    "object": Constraint.json_object(),
}
CHOICES = {
    "auto": AUTO,
    "none": ToolChoice("none"),
    "required": ToolChoice("required"),
    "named": ToolChoice("required", frozenset(["note"])),
    "allowed": ToolChoice("auto", frozenset(["now", "weather"])),
}
TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>")


def grammar(
    kind: str, choice: ToolChoice, reasoning: Any, parallel: bool, tokenizer: Tokenizer
) -> AnswerGrammar:
    return AnswerGrammar(
        FORMATS[kind] if choice.may_call else None,
        TOOLS,
        choice,
        parallel=parallel,
        reasoning=reasoning,
        special_ids=tokenizer.special_ids,
        parameters=".function.parameters",
    )


def style(kind: str, choice: ToolChoice, reasoning: str, parallel: bool) -> CallStyle:
    return CallStyle(
        think=reasoning != "none",
        tools=FORMATS[kind] if choice.may_call else None,
        in_reasoning=reasoning == "inside",
        names=frozenset(SCHEMAS),
        parallel=parallel,
    )


class Writer:
    """Writes at random, with a taste for the beginnings of tags and calls, and for the ends of what has begun."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
        self._wishes = [
            text.encode()
            for text in (
                *TAGS,
                '{"name": "',
                "weather",
                "note",
                '"parameters": {',
                '"arguments": {',
                "}",
                '"}',
                '"',
                "!",
                "\n",
            )
        ]

    def write(self, constraint: Constraint, rng: random.Random) -> str | None:
        matcher = self._compiler.compile(constraint).matcher(frozenset([EOS, IM_END]))
        written: list[int] = []
        wish: list[int] = []
        while len(written) < 300:
            if matcher.ended:
                break
            allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
            if allowed[EOS] and rng.random() < 0.3:
                break
            wish = wish or self._wish(rng)
            token = wish.pop(0)
            if not allowed[token]:
                allowed[[EOS, IM_END]] = 0
                token = self._any(np.flatnonzero(allowed).tolist(), rng, late=len(written) > 100)
            if token is None:
                break
            written.append(token)
            matcher.advance(token)
        else:
            return None
        return self._tokenizer.decode(written, skip_special_tokens=False)

    def _wish(self, rng: random.Random) -> list[int]:
        text = rng.choice(self._wishes)
        specials = self._tokenizer.special_ids([text.decode()])
        return sorted(specials) or list(text)

    def _any(self, allowed: list[int], rng: random.Random, *, late: bool) -> int | None:
        closing = [token for token in allowed if token in _CLOSING]
        if late and closing:
            return closing[0]
        return rng.choice(allowed) if allowed else None


_CLOSING = frozenset(b'"}]>!')


def check(answer: Answer, choice: ToolChoice, form: Constraint | None, parallel: bool, kind: str) -> None:
    forced = choice.mode == "required"
    if kind == "llama3" and not forced and form is not None and form.kind.startswith("json"):
        # An answer of the form may look like a call, as `{"name": "note"}` does.
        return
    for call in answer.calls:
        arguments = json.loads(call.arguments)
        assert choice.names is None or call.name in choice.names
        strict = next(t["function"].get("strict") for t in TOOLS if t["function"]["name"] == call.name)
        if forced or strict:
            jsonschema.validate(arguments, SCHEMAS[call.name])
        else:
            assert isinstance(arguments, dict)
    assert parallel or len(answer.calls) <= 1
    if forced:
        assert answer.calls
        assert not answer.text
    elif form is not None and not answer.calls:
        fits(answer.text, form)
    elif form is not None:
        assert not answer.text
    if choice.may_call and kind == "hermes":
        assert "<tool_call>" not in answer.text, "a call that was none"


def fits(text: str, form: Constraint) -> None:
    match form.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), FORM)
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "choice":
            assert text in form.value
        case _:
            assert isinstance(form.value, str)
            assert re.fullmatch(form.value, text)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", list(FORMATS))
@pytest.mark.parametrize("reasoning", ["none", "may", "inside"])
def test_random_answers_are_what_they_had_to_be(kind, reasoning, special):
    tokenizer = byte_tokenizer(more_specials=TAGS if special else ())
    writer, rng = Writer(tokenizer), random.Random(f"{kind}{reasoning}{special}")
    whole = called = 0
    combinations = list(product(FORMS.items(), CHOICES.values(), (True, False)))
    for (name, form), choice, parallel in rng.sample(combinations, 24):
        asked = None if form is None else AnswerForm(form, name)
        made = grammar(kind, choice, reasoning, parallel, tokenizer).form(asked)
        if made is None:
            assert asked is None
            assert not choice.may_call
            continue
        for _ in range(2):
            text = writer.write(made.constraint, rng)
            if text is None:
                continue
            whole += 1
            answer = parse_whole(make_parser(style(kind, choice, reasoning, parallel)), text)
            called += len(answer.calls)
            try:
                check(answer, choice, form, parallel, kind)
            except Exception as error:
                raise AssertionError(f"{name} {choice} {parallel}: {text!r} -> {answer}") from error
    assert whole > 20
    assert called > 8


def test_the_model_may_always_write_a_call_as_it_has_learnt_to():
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, tokenizer.eos_ids)
    usual = {
        "hermes": '<tool_call>\n{"name": "note", "arguments": {"x": "a"}}\n</tool_call>',
        "llama3": '{"name": "note", "parameters": {"x": "a"}}',
    }
    for (kind, text), choice in product(usual.items(), (AUTO, ToolChoice("required"), CHOICES["named"])):
        made = grammar(kind, choice, "may", True, tokenizer).form(None)
        assert made is not None
        matcher = compiler.compile(made.constraint).matcher(frozenset([EOS]))
        for token in text.encode():
            matcher.advance(token)


def test_a_schema_that_cannot_be_enforced_is_told_by_its_place():
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, tokenizer.eos_ids)
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}},
    ]
    made = AnswerGrammar(
        FORMATS["hermes"],
        tools,
        AUTO,
        parallel=True,
        reasoning="none",
        special_ids=tokenizer.special_ids,
        parameters=".p",
    ).form(None)
    assert made is not None
    with pytest.raises(ConstraintError) as caught:
        compiler.compile(made.constraint)
    refusal = made.refusal(caught.value, compiler.compile)
    assert (refusal.status, refusal.param) == (400, "tools[3].p")
    assert "not" in refusal.message
