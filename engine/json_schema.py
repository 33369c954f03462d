"""What a JSON schema asks for that a grammar alone would let slip, found out before it becomes one. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .constraint import ConstraintError

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold schemas by name."""
_VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold values, whatever these look like."""


def prepare(schema: dict[str, Any]) -> bool:
    """Drops from a schema what says nothing, and returns whether any character may be written as an escape, `\\u0061`.

    That may not be where an object's keys could be: `{"\\u0061": 1}` has the key `a`, but no grammar of texts sees that.
    Raises `ConstraintError` for a number of keys that repeated ones could feign.
    """
    escapes = True
    for part in _schemas(schema):
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if not _open_keys(part):
            continue
        escapes = escapes and not (part.get("properties") or part.get("patternProperties"))
        least = part.get("minProperties")
        if isinstance(least, int) and least > len(part.get("required") or ()) + 1:
            raise ConstraintError(
                "minProperties",
                f"json_schema: minProperties {least} cannot be enforced where keys are free: they could repeat;"
                " require some by name, or forbid others by additionalProperties",
            )
    return escapes


def _open_keys(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all inside it."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            yield part
            for key, value in part.items():
                if key in _MAPS and isinstance(value, dict):
                    left += value.values()
                elif key not in _VALUES:
                    left.append(value)
