"""Values that may fit a JSON schema, drawn from a seed, and values that are near to ones that do."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

from .schemas import FORMATS, MOST_DEEP, PATTERNS, WORDS, Schema


class InstanceMaker:
    """Draws values that may fit a schema, and values that are near to ones that do: for a validator to tell apart.

    Members of objects stand in the order in which the schema names them, since a constrained answer has them so.
    """

    def __init__(self, schema: Schema, rng: random.Random) -> None:
        self._root = schema
        self._rng = rng

    def draw(self) -> Any:
        """A value that is likely to fit."""
        return self._draw(self._root, 0)

    def near(self, value: Any) -> Any:
        """`value` with one thing changed somewhere."""
        places = list(_places(value))
        path = self._rng.choice(places)
        return _replaced(value, path, self._changed(_at(value, path)))

    def _draw(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return self._anything()
        schema = self._resolved(dict(schema), depth)
        if "const" in schema:
            return copy.deepcopy(schema["const"])
        if schema.get("enum"):
            return copy.deepcopy(self._rng.choice(schema["enum"]))
        kinds = schema.get("type") or _kind_by_keywords(schema)
        kind = self._rng.choice(kinds) if isinstance(kinds, list) else kinds
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._text(schema)
            case "integer" | "number":
                return self._number(schema, kind)
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
            case _:
                return self._anything()

    def _resolved(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """The schema with its references and combinations merged into one, by a choice where there is one."""
        for _ in range(20):
            if "$ref" in schema:
                parts = [referred(self._root, schema.pop("$ref"))]
            elif "allOf" in schema:
                parts = schema.pop("allOf")
            elif schema.get("anyOf") or schema.get("oneOf"):
                parts = [self._rng.choice(schema.pop("anyOf", None) or schema.pop("oneOf"))]
            else:
                break
            for part in parts:
                schema = _merged(schema, part) if isinstance(part, Mapping) else schema
        return schema

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        required = schema.get("required") or []
        made = {}
        for name, part in properties.items():
            if name in required or (depth < MOST_DEEP and self._rng.random() < 0.5):
                made[name] = self._draw(part, depth + 1)
        more = schema.get("additionalProperties", {})
        for name in required:
            if name not in made:
                made[name] = self._draw(more, depth + 1)
        low, high = schema.get("minProperties", 0), schema.get("maxProperties", 5)
        wanted = self._rng.randint(low, max(low, min(high, low + 2)))
        for pattern, part in (schema.get("patternProperties") or {}).items():
            if pattern == "^x-[a-z]+$" and self._rng.random() < 0.7:
                made[self._rng.choice(("x-a", "x-extra"))] = self._draw(part, depth + 1)
        if more is not False:
            for i in range(wanted - len(made)):
                made[f"more{i}"] = self._draw(more, depth + 1)
        return made

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        prefix = schema.get("prefixItems") or []
        rest = schema.get("items", {})
        low = schema.get("minItems", 0)
        high = schema.get("maxItems", max(low, 3))
        length = low if depth >= MOST_DEEP else self._rng.randint(low, max(low, min(high, low + 3)))
        if rest is False:
            length = min(length, len(prefix))
        return [self._draw(prefix[i] if i < len(prefix) else rest, depth + 1) for i in range(length)]

    def _text(self, schema: dict[str, Any]) -> str:
        if schema.get("format") in FORMATS:
            return self._rng.choice(FORMATS[schema["format"]])
        if schema.get("pattern") in PATTERNS:
            return self._rng.choice(PATTERNS[schema["pattern"]])
        low = schema.get("minLength", 0)
        high = schema.get("maxLength", low + 12)
        text = self._rng.choice(WORDS)
        text += "".join(self._rng.choices("abz é", k=max(0, low - len(text))))
        return text[: max(high, 0)]

    def _number(self, schema: dict[str, Any], kind: str) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        low = (high - 50 if high is not None else -50) if low is None else low
        high = low + 100 if high is None else high
        step = schema.get("multipleOf") or (1 if kind == "integer" else 0.25)
        value = -(-low // step) * step + self._rng.randrange(0, max(1, int((high - low) // step) + 1)) * step
        if kind == "integer" or (float(value).is_integer() and self._rng.random() < 0.5):
            return int(value)
        return float(value)

    def _anything(self) -> Any:
        return copy.deepcopy(self._rng.choice(("text", 3, -0.5, True, None, [1, "a"], {"k": "v"}, [], {})))

    def _changed(self, value: Any) -> Any:
        match value:
            case dict() if value and self._rng.random() < 0.4:
                gone = self._rng.choice(list(value))
                return {name: part for name, part in value.items() if name != gone}
            case dict() if self._rng.random() < 0.7:
                return {**value, "unasked": self._anything()}
            case list() if value and self._rng.random() < 0.5:
                return value[:-1] if self._rng.random() < 0.5 else [*value, value[-1]]
            case bool():
                return not value if self._rng.random() < 0.5 else "true"
            case int() | float() if self._rng.random() < 0.8:
                return value + self._rng.choice((-1000, -1, 1, 1000, 0.5))
            case str() if self._rng.random() < 0.8:
                return self._rng.choice((value + "!", value[:-1], value.upper(), value * 3, "0" + value))
            case _:
                return self._anything()


def referred(root: Any, ref: Any) -> Any:
    """What a reference within a schema points to; a schema for anything, where it points elsewhere or to nothing."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return {}
    found = root
    for name in ref.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    return found


def _kind_by_keywords(schema: Mapping[str, Any]) -> str | None:
    for kind, names in (
        ("object", ("properties", "required", "additionalProperties", "patternProperties", "minProperties")),
        ("array", ("items", "prefixItems", "minItems")),
        ("string", ("pattern", "format", "minLength", "maxLength")),
        ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    ):
        if any(name in schema for name in names):
            return kind
    return None


def _merged(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {**first, **second}
    if "properties" in first and "properties" in second:
        both["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        both["required"] = [*first["required"], *second["required"]]
    return both


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from _places(part, (*path, name))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    made = copy.copy(value)
    made[path[0]] = _replaced(value[path[0]], path[1:], new)
    return made
