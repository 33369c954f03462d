"""Schemas to be tried, drawn or out of a directory, each with values that fit it and values that do not."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .schema_values import InstanceMaker, referred
from .schemas import FORMATS, Schema, drawn_schemas

DRAWS, NEAR = 5, 2
"""Values drawn for each schema, and how often each of them is changed a little."""


class CasesError(Exception):
    """The directory cannot be used."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, what it is about, and values of which it is known whether they fit."""

    name: str
    schema: Schema
    values: Sequence[tuple[Any, bool]] = field(default=())


def drawn_cases(count: int, seed: int) -> Iterator[Case]:
    """`count` cases over all keywords."""
    for i, (name, schema) in enumerate(drawn_schemas(count, seed)):
        yield Case(name, schema, judged(schema, random.Random(f"{seed}/{i}/values")))


def read_cases(directory: Path, seed: int) -> Iterator[Case]:
    """A case for each schema in the `.json` files below a directory, in the order of their names.

    A file holds a schema; or an object with `schema` and, under `tests`, `{"data", "valid"}` entries; or a list of such
    objects. Raises `CasesError`.
    """
    files = sorted(directory.rglob("*.json"))
    if not files:
        raise CasesError(f"{directory} has no .json files")
    for path in files:
        name = str(path.relative_to(directory))
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CasesError(f"{path}: {error}") from None
        groups = found if isinstance(found, list) else [found]
        for group in groups:
            if isinstance(group, dict) and isinstance(group.get("tests"), list) and "schema" in group:
                tests = [
                    (test["data"], bool(test["valid"]))
                    for test in group["tests"]
                    if {"data", "valid"} <= test.keys()
                ]
                yield Case(name, group["schema"], tests)
            elif isinstance(group, (dict, bool)):
                yield Case(name, group, judged(group, random.Random(f"{seed}/{name}")))
            else:
                raise CasesError(f"{path}: neither a schema nor a list of tests")


def judged(schema: Schema, rng: random.Random) -> list[tuple[Any, bool]]:
    """Drawn values and whether they fit, as the validator says; none where it cannot say."""
    judge = Judge.of(schema)
    if judge is None:
        return []
    maker = InstanceMaker(schema, rng)
    values = []
    for _ in range(DRAWS):
        drawn = maker.draw()
        for value in (drawn, *(maker.near(drawn) for _ in range(NEAR))):
            fits = judge.fits(value)
            if fits is not None:
                values.append((value, fits))
    return values


class Judge:
    """The validator of the jsonschema package for one schema."""

    def __init__(self, lax: Any, strict: Any) -> None:
        self._lax = lax
        self._strict = strict

    @classmethod
    def of(cls, schema: Schema) -> Judge | None:
        """None for what is no schema, or refers to what is not there."""
        jsonschema: Any = importlib.import_module("jsonschema")
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            validator.check_schema(schema)
        except jsonschema.exceptions.SchemaError:
            return None
        known = jsonschema.FormatChecker(formats=())
        for name, texts in FORMATS.items():
            known.checks(name)(lambda value, texts=texts: not isinstance(value, str) or value in texts)
        # Nothing is ever fetched: an empty registry knows of no other documents.
        registry = importlib.import_module("referencing").Registry()
        lax, strict = (
            validator(schema, format_checker=checker, registry=registry)
            for checker in (validator.FORMAT_CHECKER, known)
        )
        return cls(lax, strict)

    def fits(self, value: Any) -> bool | None:
        """Whether the value fits; None where that hangs on a format which the package does not check in full, or on a
        reference into nowhere."""
        lax = _verdict(self._lax, value)
        return lax if not lax or _verdict(self._strict, value) else None

    def allows(self, value: Any) -> bool:
        """Whether the value fits, as far as the package checks formats."""
        return _verdict(self._lax, value) is not False


def _verdict(validator: Any, value: Any) -> bool | None:
    errors: Any = importlib.import_module("referencing.exceptions")
    try:
        return validator.is_valid(value)
    except errors.Unresolvable:
        return None


def as_text(value: Any, schema: Schema) -> str:
    """JSON as a constrained answer would have it: compact, whole numbers without a point, members in the schema's order."""
    return json.dumps(_arranged(value, schema, schema), ensure_ascii=False, separators=(",", ":"))


def _arranged(value: Any, schema: Any, root: Any) -> Any:
    match value:
        case dict():
            parts = dict(_members(schema, root, 0))
            ranks = {name: rank for rank, name in enumerate(parts)}
            names = sorted(value, key=lambda name: ranks.get(name, len(ranks)))
            return {name: _arranged(value[name], parts.get(name), root) for name in names}
        case list():
            inner = schema.get("items") if isinstance(schema, dict) else None
            return [_arranged(part, inner, root) for part in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def _members(schema: Any, root: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Names of an object's members and their schemas, in order, through references and combinations."""
    if not isinstance(schema, dict) or depth > 8:
        return
    properties = schema.get("properties")
    yield from properties.items() if isinstance(properties, dict) else ()
    if "$ref" in schema:
        yield from _members(referred(root, schema["$ref"]), root, depth + 1)
    for name in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(name) or ():
            yield from _members(part, root, depth + 1)
