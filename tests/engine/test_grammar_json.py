"""What JSON schemas allow: white space, strings, keys, and keywords that cannot be enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.allowed import STOPS, accepts, begins, compiler, ids_of, refused
from tierax.engine.constraint import Constraint

GRAMMARS = compiler()


def schema(**keywords: Any) -> Constraint:
    return Constraint.json_schema(keywords)


INT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "text",
    ['{"a":3}', '{"a": 3}', '{ "a": 3 }', '{\n    "a": 3\n}', '{\n"a"\n:\n3\n}'],
)
def test_json_with_usual_white_space(text: str) -> None:
    assert accepts(GRAMMARS, Constraint.json_schema(INT), text)


@pytest.mark.parametrize(
    "text", [" {", "\n", "{  ", "{\n\n", "{\t", '{"a": 3} ', '{"a": 3}\n', "{\n" + 17 * " "]
)
def test_json_white_space_is_bounded_and_stays_inside(text: str) -> None:
    assert not begins(GRAMMARS, Constraint.json_schema(INT), text)


@pytest.mark.parametrize("loved", ["\n", " ", "\t", "  \n"])
def test_a_model_that_loves_white_space_comes_to_an_end(loved: str) -> None:
    matcher = GRAMMARS.compile(Constraint.json_schema(INT)).matcher(STOPS)
    text = b""
    while not matcher.ended and not ids_of(matcher) >= STOPS and len(text) < 100:
        allowed = ids_of(matcher)
        token = next((ord(c) for c in loved if ord(c) in allowed), max(allowed))
        matcher.advance(token)
        text += bytes([token])
    assert json.loads(text).keys() == {"a"}
    assert len(text) < (100 if " " in loved else 40)


def test_strings_with_a_length_hold_escapes_and_count_characters() -> None:
    short = schema(type="string", maxLength=4)
    good = ['"a\\"b\\n"', '"\\ud83d\\ude42abc"', '"🙂🙂🙂🙂"', '""', '"\\u0041\\\\"']
    bad = ['"a\tb"', '"abcde"', '"\\ud83d"', '"\\ude42"', '"\\ud83dx"', '"🙂🙂🙂🙂🙂"', '"\x00"', '"\\x41"']
    assert [text for text in good if not accepts(GRAMMARS, short, text)] == []
    assert [text for text in bad if accepts(GRAMMARS, short, text)] == []
    for text in good:
        assert len(json.loads(text)) <= 4


def test_keys_cannot_be_had_under_another_spelling() -> None:
    typed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(GRAMMARS, Constraint.json_schema(typed), '{"a": 1, "b": "x"}')
    for text in ('{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}', '{"a": 1, "a": "x"}'):
        assert not begins(GRAMMARS, Constraint.json_schema(typed), text)
    nested = schema(type="array", items={"patternProperties": {"^a": {"type": "null"}}})
    assert not begins(GRAMMARS, nested, '[{"\\u0061b": 1')


def test_keywords_that_ask_for_nothing_are_no_obstacle() -> None:
    assert accepts(GRAMMARS, schema(type="array", uniqueItems=False), "[1, 1]")
    few = schema(type="object", required=["a"], minProperties=2, additionalProperties={"type": "null"})
    assert accepts(GRAMMARS, few, '{"a": null, "b": null}')
    assert not accepts(GRAMMARS, few, '{"a": null}')
    values = schema(enum=[{"minProperties": 9, "uniqueItems": False}])
    assert accepts(GRAMMARS, values, '{"minProperties": 9, "uniqueItems": false}')


def test_json_object_is_any_object_and_nothing_else() -> None:
    for text in ("{}", '{"a": [1, {"b": null}], "c": -1.5e3}'):
        assert accepts(GRAMMARS, Constraint.json_object(), text)
    for text in ("[", "3", '"', "n"):
        assert not begins(GRAMMARS, Constraint.json_object(), text)


def test_a_schema_of_true_is_any_value() -> None:
    assert accepts(GRAMMARS, Constraint.json_schema("true"), "[1, null]")


@pytest.mark.parametrize(
    ("given", "keyword"),
    [
        ({"type": "nope"}, "type"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"dependencies": {"a": ["b"]}}, "dependencies"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"properties": {"a": {"if": {}}}}, "if"),
        ({"type": "string", "pattern": r"^(a)\1$"}, "pattern"),
        ({"type": "string", "format": "zork"}, "format"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
        ({"$ref": "#/nope"}, "$ref"),
        ({"enum": []}, "enum"),
        ({"type": "string", "pattern": r"\bfoo\b"}, "pattern"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"properties": {"a": {"minProperties": 3, "required": ["x"]}}}, "minProperties"),
        ({"type": "object", "not": {}, "x-guidance": {"lenient": True}}, "not"),
        ('{"type": ', "json_schema"),
        ("false", "json_schema"),
        ("3", "json_schema"),
        ([], "json_schema"),
        ({"const": float("nan")}, "json_schema"),
        ({"const": {1, 2}}, "json_schema"),
        ({"const": "\ud800"}, "json_schema"),
        ("[" * 100_000, "json_schema"),
        ('{"a":' * 5000 + "{}" + "}" * 5000, "json_schema"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_keyword(given: Any, keyword: str) -> None:
    assert refused(GRAMMARS, lambda: Constraint.json_schema(given)).keyword == keyword


def test_a_refusal_is_remembered_and_raised_anew() -> None:
    constraint = schema(uniqueItems=True)
    errors = [refused(GRAMMARS, lambda: constraint) for _ in range(2)]
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])
