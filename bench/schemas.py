"""JSON schemas over every keyword of draft 2020-12, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any] | bool

NAMES = ("id", "name", "city", "tags", "score", "active", "note", "size", "unit", "größe")
WORDS = ("ox", "Ulm", "a b", 'say "hi"', "tab\tand\nline", "naïve", "🙂🙂", "\\path", "x" * 12, "")
PATTERNS: dict[str, tuple[str, ...]] = {
    "^[a-z]{2,5}$": ("ab", "hello"),
    "^[A-Z][a-z]+( [A-Z][a-z]+)*$": ("Ulm", "Bad Tölz", "New York"),
    r"^\d{3}-\d{4}$": ("555-0199", "000-1234"),
    "^(red|green|blue)$": ("red", "blue"),
    "^#[0-9a-f]{6}$": ("#00ff7f", "#123456"),
    "colou?r": ("color", "my colour is"),
    "^v[0-9]+": ("v1", "v12-beta"),
    "[.!?]$": ("Done.", "Why?"),
}
"""Patterns, each with texts that match or nearly do."""
FORMATS: dict[str, tuple[str, ...]] = {
    "date": ("2024-02-29", "1999-12-31"),
    "time": ("12:30:00Z", "23:59:59.5+01:00"),
    "date-time": ("2024-02-29T12:30:00Z", "1999-12-31T23:59:59.5+01:00"),
    "duration": ("P1D", "PT2H30M"),
    "email": ("a@example.org", "first.last@example.com"),
    "hostname": ("example.org", "a-b.example"),
    "ipv4": ("127.0.0.1", "10.20.30.40"),
    "ipv6": ("::1", "2001:db8::ff00:42:8329"),
    "uri": ("https://example.org/a?b=c", "urn:isbn:0451450523"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
}
MOST_DEEP = 3


class SchemaMaker:
    """Draws one schema: `make(keyword)` gives one that uses this keyword, among others."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: dict[str, Schema] = {}

    def make(self, keyword: str) -> Schema:
        """A schema with this keyword of `KEYWORDS`, at its root or below an object or a list."""
        schema = KEYWORDS[keyword](self)
        wrap = self._rng.randrange(4)
        if wrap == 0:
            schema = {
                "type": "object",
                "properties": {self._name(): schema},
                "additionalProperties": self._yes(),
            }
            schema["required"] = list(schema["properties"])
        elif wrap == 1:
            schema = {"type": "array", "items": schema, "maxItems": 3}
        if self._defs and isinstance(schema, dict):
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
            schema["$defs"] = self._defs
        return schema

    # Kinds of values.

    def any_of_them(self, depth: int = 0) -> dict[str, Any]:
        """A schema of any kind."""
        plain = (self.text, self.number, self.integer, self.boolean, self.null, self.enum)
        deep = (self.object, self.array) if depth < MOST_DEEP else ()
        kind = self._rng.choice((*plain, *deep))
        return kind(depth + 1)

    def text(self, depth: int = 0, keyword: str | None = None) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        match keyword or self._rng.choice(("plain", "length", "pattern", "format")):
            case "length" | "minLength" | "maxLength":
                low = self._rng.randrange(4)
                schema |= {"minLength": low, "maxLength": low + self._rng.randrange(1, 9)}
                if keyword is None:
                    schema.pop(self._rng.choice(("minLength", "maxLength")))
            case "pattern":
                schema["pattern"] = self._rng.choice(list(PATTERNS))
            case "format":
                schema["format"] = self._rng.choice(list(FORMATS))
        return schema

    def number(self, depth: int = 0, keyword: str | None = None) -> dict[str, Any]:
        return self._numeric("number", 0.5, keyword)

    def integer(self, depth: int = 0, keyword: str | None = None) -> dict[str, Any]:
        return self._numeric("integer", 1, keyword)

    def boolean(self, depth: int = 0) -> dict[str, Any]:
        return {"type": "boolean"}

    def null(self, depth: int = 0) -> dict[str, Any]:
        return {"type": "null"}

    def enum(self, depth: int = 0) -> dict[str, Any]:
        values = [self._rng.choice(WORDS), self._rng.randrange(-5, 100), None, True, {"x": [1, "y"]}, 2.5]
        return {"enum": self._rng.sample(values, self._rng.randrange(1, len(values)))}

    def object(self, depth: int = 0, keyword: str | None = None) -> dict[str, Any]:
        names = self._rng.sample(NAMES, self._rng.randrange(1, 5))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.any_of_them(depth) for name in names},
            "required": [name for name in names if self._yes()],
        }
        match keyword:
            case "additionalProperties":
                schema["additionalProperties"] = self._rng.choice((False, self.any_of_them(depth)))
            case "patternProperties":
                schema["patternProperties"] = {"^x-[a-z]+$": self.any_of_them(depth)}
                schema["additionalProperties"] = False
            case "minProperties" | "maxProperties":
                schema = {"type": "object", "additionalProperties": self.any_of_them(depth)}
                schema[keyword] = self._rng.randrange(1, 4)
            case "propertyNames":
                schema["propertyNames"] = {"pattern": "^[a-z]+$"}
            case "dependentRequired":
                schema["dependentRequired"] = {names[0]: [names[-1]]}
            case "dependentSchemas":
                schema["dependentSchemas"] = {names[0]: {"required": [names[-1]]}}
            case "unevaluatedProperties":
                schema["unevaluatedProperties"] = False
            case None if self._yes():
                schema["additionalProperties"] = False
        return schema

    def array(self, depth: int = 0, keyword: str | None = None) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.any_of_them(depth)}
        low = self._rng.randrange(3)
        match keyword:
            case "minItems" | "maxItems" | None:
                schema |= {"minItems": low, "maxItems": low + self._rng.randrange(1, 4)}
            case "prefixItems":
                schema["prefixItems"] = [self.any_of_them(depth) for _ in range(self._rng.randrange(1, 4))]
                schema["items"] = self._rng.choice((False, self.any_of_them(depth)))
            case "uniqueItems":
                schema["uniqueItems"] = True
            case "contains" | "minContains" | "maxContains":
                schema |= {"contains": self.any_of_them(depth), "minContains": 1, "maxContains": 2}
            case "unevaluatedItems":
                schema = {"type": "array", "prefixItems": [self.integer()], "unevaluatedItems": False}
        return schema

    # Combinations.

    def any_of(self) -> dict[str, Any]:
        return {"anyOf": [self.any_of_them(1) for _ in range(self._rng.randrange(2, 4))]}

    def one_of(self) -> dict[str, Any]:
        # Some that exclude each other by their types, and some that overlap.
        apart = self._rng.sample((self.text, self.integer, self.boolean, self.null, self.array), 2)
        if self._yes():
            return {"oneOf": [make(2) for make in apart]}
        low = self._rng.randrange(10)
        return {"oneOf": [{"type": "integer", "minimum": low}, {"type": "integer", "maximum": low + 3}]}

    def all_of(self) -> dict[str, Any]:
        first, second = self._rng.sample(NAMES, 2)
        low = self._rng.randrange(10)
        return self._rng.choice(
            (
                {"allOf": [{"type": "integer", "minimum": low}, {"type": "integer", "maximum": low + 20}]},
                {
                    "allOf": [
                        {"type": "object", "properties": {first: self.any_of_them(2)}, "required": [first]},
                        {"type": "object", "properties": {second: self.any_of_them(2)}},
                    ]
                },
                {"allOf": [self.text(keyword="length"), {"pattern": "^[a-z]*$"}]},
            )
        )

    def not_(self) -> dict[str, Any]:
        return {"type": ["string", "integer"], "not": {"enum": ["no", 0]}}

    def if_(self) -> dict[str, Any]:
        kind = {"properties": {"kind": {"const": "circle"}}}
        needs = {"required": ["radius"]}
        properties = {"kind": {"enum": ["circle", "square"]}, "radius": self.number(), "side": self.number()}
        return {
            "type": "object",
            "properties": properties,
            "required": ["kind"],
            "if": kind,
            "then": needs,
            "else": {"required": ["side"]},
        }

    def ref(self) -> dict[str, Any]:
        self._defs["part"] = self.any_of_them(1)
        return {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/part"}, "b": {"$ref": "#/$defs/part"}},
            "required": ["a"],
            "additionalProperties": False,
        }

    def recursive_ref(self) -> dict[str, Any]:
        child = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
        properties = {"label": self.any_of_them(2), "children": child}
        self._defs["tree"] = {
            "type": "object",
            "properties": properties,
            "required": ["label"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/tree"}

    def remote_ref(self) -> dict[str, Any]:
        return {"$ref": "https://example.org/not-here.json"}

    def const(self) -> dict[str, Any]:
        return {"const": self._rng.choice((*WORDS, 7, -2.5, None, False, [1, [2]], {"a": {"b": 'q"'}}))}

    def types(self) -> dict[str, Any]:
        return {
            "type": self._rng.sample(("string", "integer", "number", "boolean", "null", "array", "object"), 3)
        }

    def annotations(self) -> dict[str, Any]:
        notes = {"title": "A title", "description": "What it is", "examples": [1], "deprecated": True}
        return {**notes, "$comment": "no more than words", "default": None, **self.any_of_them(1)}

    def boolean_schema(self) -> dict[str, Any]:
        properties = {"free": True, "never": False}
        return {
            "type": "object",
            "properties": properties,
            "required": ["free"],
            "additionalProperties": False,
        }

    def empty(self) -> dict[str, Any]:
        return {}

    def contradiction(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": 5, "maximum": 4}

    # Pieces.

    def _numeric(self, kind: str, step: float, keyword: str | None) -> dict[str, Any]:
        low = self._rng.randrange(-20, 100) * step
        high = low + self._rng.randrange(3, 300) * step
        bounds = {
            "minimum": low,
            "maximum": high,
            "exclusiveMinimum": low,
            "exclusiveMaximum": high,
            "multipleOf": self._rng.choice((2, 3, 5)) * step,
        }
        names = [keyword] if keyword else self._rng.sample(list(bounds), self._rng.randrange(3))
        if "minimum" in names and "exclusiveMinimum" in names:
            names.remove("minimum")
        if "maximum" in names and "exclusiveMaximum" in names:
            names.remove("maximum")
        return {"type": kind, **{name: bounds[name] for name in names}}

    def _name(self) -> str:
        return self._rng.choice(NAMES)

    def _yes(self) -> bool:
        return self._rng.random() < 0.5


def _of(kind: str, keyword: str) -> Callable[[SchemaMaker], dict[str, Any]]:
    return lambda maker: getattr(maker, kind)(keyword=keyword)


KEYWORDS: dict[str, Callable[[SchemaMaker], dict[str, Any]]] = {
    "type": SchemaMaker.types,
    "enum": SchemaMaker.enum,
    "const": SchemaMaker.const,
    **{name: _of("text", name) for name in ("minLength", "maxLength", "pattern", "format")},
    **{
        name: _of(kind, name)
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        for kind in ("number",)
    },
    "multipleOf": _of("integer", "multipleOf"),
    "properties": SchemaMaker.object,
    "required": SchemaMaker.object,
    **{
        name: _of("object", name)
        for name in (
            *("additionalProperties", "patternProperties", "minProperties", "maxProperties"),
            *("propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
        )
    },
    "items": SchemaMaker.array,
    **{
        name: _of("array", name)
        for name in (
            *("prefixItems", "minItems", "maxItems", "uniqueItems"),
            *("contains", "minContains", "maxContains", "unevaluatedItems"),
        )
    },
    "anyOf": SchemaMaker.any_of,
    "oneOf": SchemaMaker.one_of,
    "allOf": SchemaMaker.all_of,
    "not": SchemaMaker.not_,
    "if": SchemaMaker.if_,
    "$ref": SchemaMaker.ref,
    "$ref, recursive": SchemaMaker.recursive_ref,
    "$ref, remote": SchemaMaker.remote_ref,
    "title": SchemaMaker.annotations,
    "boolean schemas": SchemaMaker.boolean_schema,
    "no keyword": SchemaMaker.empty,
    "contradiction": SchemaMaker.contradiction,
}
"""What a drawn schema is about -> how it is drawn."""


def drawn_schemas(count: int, seed: int) -> Iterator[tuple[str, Schema]]:
    """`count` pairs of what a schema is about and the schema, each keyword as often as the others."""
    names = list(KEYWORDS)
    for i in range(count):
        name = names[i % len(names)]
        yield name, SchemaMaker(random.Random(f"{seed}/{i}")).make(name)
