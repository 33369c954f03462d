"""Random answers under many schemas are valid in the eyes of the `jsonschema` package, and sound values are let through."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator, validator_for

from helpers.allowed import STOPS, accepts, compiler, ids_of
from tierax.engine.constraint import Constraint, Matcher

GRAMMARS = compiler()
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "integer", "minimum": -5, "maximum": 12}, [-5, 0, 12]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, [4]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, -14, 770]),
    ({"type": "number", "minimum": -1.5, "maximum": 3.25}, [-1.5, 0, 3.25, 1.125]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001]),
    ({"type": "number", "multipleOf": 0.5}, [1.5, 2, -0.5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", 'a"\n', "éß🙂"]),
    ({"type": "string", "pattern": "^[a-c]{2,3}$"}, ["ab", "abc"]),
    ({"type": "string", "pattern": "^b.d"}, ["bed", "bad day"]),
    ({"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5}, ["abc", "abcde"]),
    ({"type": "string", "format": "date"}, ["2026-11-30"]),
    ({"type": "string", "format": "date-time"}, ["2026-11-30T12:00:00Z"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"]),
    ({"enum": ["a", 1, None, {"x": [1]}, 1.5, True]}, ["a", 1, None, {"x": [1]}, 1.5, True]),
    ({"const": {"a": [1, "é"]}}, [{"a": [1, "é"]}]),
    ({"type": ["string", "null"], "maxLength": 2}, [None, "ab"]),
    ({"type": "boolean"}, [True, False]),
    ({"type": "null"}, [None]),
    ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 1}]}, [5, "x"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, [5, "x"]),
    ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3]]),
    (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "null"}],
            "items": False,
            "minItems": 1,
        },
        [[1], [1, None]],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
            "required": ["b"],
        },
        [{"a": 1, "b": None}, {"b": None, "c": "other"}],
    ),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"ab": 3}],
    ),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}, [{"x": 1}]),
    ({"type": "object", "maxProperties": 1, "additionalProperties": {"type": "null"}}, [{}, {"x": None}]),
    (
        {"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "null"}}}], "type": "object"},
        [{"a": None}],
    ),
    (TREE, [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}]),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "integer"}],
        },
        [[1], [1, "x"]],
    ),
]


def walk(matcher: Matcher, rng: random.Random) -> str | None:
    """A random text that is whole, or None where it grew too long."""
    text = b""
    while not matcher.ended:
        allowed = ids_of(matcher)
        if allowed >= STOPS and rng.random() < 0.5:
            break
        if len(text) > 300:
            return None
        letters = sorted(allowed - STOPS)
        closing = [token for token in letters if chr(token) in '}]",:']
        simple = [token for token in letters if token < 128] or letters
        token = rng.choice(closing if closing and rng.random() < 0.4 else simple)
        matcher.advance(token)
        text += bytes([token])
    return text.decode()


@pytest.mark.parametrize("case", range(len(SCHEMAS)))
def test_random_answers_are_valid(case: int) -> None:
    schema, _ = SCHEMAS[case]
    kind = validator_for(schema, default=Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    compiled = GRAMMARS.compile(Constraint.json_schema(schema))
    whole = 0
    for seed in range(25):
        text = walk(compiled.matcher(STOPS), random.Random(seed))
        if text is not None:
            validator.validate(json.loads(text))
            whole += 1
    assert whole > 0


@pytest.mark.parametrize("case", range(len(SCHEMAS)))
def test_sound_values_are_let_through(case: int) -> None:
    schema, values = SCHEMAS[case]
    constraint = Constraint.json_schema(schema)
    for value in values:
        for text in (
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, ensure_ascii=False, separators=(",", ":")),
            json.dumps(value, ensure_ascii=False, indent=2),
        ):
            assert accepts(GRAMMARS, constraint, text), text
