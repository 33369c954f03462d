"""What bodies say about the form of answers: a schema, a pattern, a grammar, choices or tagged parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...engine.constraint import Constraint, ConstraintError
from ..http.errors import ApiError, bad_request

Schema = dict[str, Any] | bool
"""A JSON schema."""
SchemaText = dict[str, Any] | bool | str
"""A JSON schema, or its JSON text."""


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True):
    """`json_schema` of a response format; without a schema any object will do. An answer fits it, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: NamedSchema


class Tagged(msgspec.Struct, kw_only=True):
    """A tagged part: `begin`, JSON that fits `schema`, `end`."""

    begin: str
    end: str = ""
    schema: Schema | None = None


class StructuralTagFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="structural_tag"):
    """Free text with tagged parts, either as `structures` and `triggers` or as `format`, the newer spelling."""

    structures: list[Tagged] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """`structured_outputs`: one of these."""

    json: SchemaText | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: Any = None
    disable_additional_properties: Any = None


class Formed(msgspec.Struct, kw_only=True):
    """Fields of bodies whose answers may be held to a form: as OpenAI, vLLM and SGLang call them. At most one is given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Any = None
    json_schema: SchemaText | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer's text must match."""

    constraint: Constraint
    param: str
    """Field of the body that asks for it, for error messages."""
    parts: tuple[tuple[str, Constraint], ...] = ()
    """Fields whose contents are parts of it: one that cannot be enforced is at fault."""

    def refusal(self, error: ConstraintError, compile: Callable[[Constraint], object]) -> ApiError:
        """The answer to who asked for what cannot be enforced; `compile` raises `ConstraintError`."""
        for param, part in self.parts:
            try:
                compile(part)
            except ConstraintError as cause:
                return refused(param, cause)
        return refused(self.param, error)


def refused(param: str, error: ConstraintError) -> ApiError:
    """400 that names the field and what in it is at fault."""
    message = f"{param}: {error}"
    if error.keyword not in message:
        message = f"{param}: {error.keyword}: {error}"
    return bad_request(message, param, "invalid_constraint")


class Asking(Protocol):
    """A body that has some of the fields of `Formed`."""


def answer_form(body: Asking, where: str = "") -> AnswerForm | None:
    """What a body asks of its answers; None = any text will do. `where`: what stands before its fields' names.

    Raises `ApiError` 400 for more than one form, and for what is malformed in itself.
    """
    asked = [(where + param, make) for param, make in _asked(body)]
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(param for param, _ in asked)
        raise bad_request(f"{names} each say what the answer must match: give one of them.", asked[1][0])
    param, make = asked[0]
    return make_form(param, make)


def make_form(param: str, make: Callable[[], Constraint]) -> AnswerForm:
    """A form out of one field. Raises `ApiError` 400 that names the field if it is malformed."""
    try:
        return AnswerForm(make(), param)
    except ConstraintError as error:
        raise refused(param, error) from None


def _asked(body: Any) -> Iterator[tuple[str, Callable[[], Constraint]]]:
    """Every form that a body asks for: the field, and what makes the constraint."""
    yield from _of_format(getattr(body, "response_format", None))
    outputs: StructuredOutputs | None = getattr(body, "structured_outputs", None)
    if outputs is not None:
        yield from _of_outputs(outputs)
    for name, make in _PLAIN.items():
        value = getattr(body, name, None)
        if value is not None:
            yield name, lambda make=make, value=value: make(value)
    _refuse(body, "guided_whitespace_pattern")


def _of_format(found: ResponseFormat | None) -> Iterator[tuple[str, Callable[[], Constraint]]]:
    match found:
        case JsonObjectFormat():
            yield "response_format", Constraint.json_object
        case JsonSchemaFormat(json_schema=named):
            schema = {"type": "object"} if named.schema is None else named.schema
            yield "response_format", lambda: Constraint.json_schema(schema)
        case StructuralTagFormat(structures=structures, triggers=triggers, format=inner):
            value = {"structures": structures, "triggers": triggers, "format": inner}
            yield "response_format", lambda: _structural_tag(value)
        case _:
            return


def _of_outputs(outputs: StructuredOutputs) -> Iterator[tuple[str, Callable[[], Constraint]]]:
    for name in ("whitespace_pattern", "disable_additional_properties"):
        _refuse(outputs, name, "structured_outputs.")
    for name, make in _OUTPUTS.items():
        value = getattr(outputs, name)
        if value is not None:
            yield f"structured_outputs.{name}", lambda make=make, value=value: make(value)
    if outputs.json_object:
        yield "structured_outputs.json_object", Constraint.json_object


def _refuse(fields: Any, name: str, where: str = "") -> None:
    if getattr(fields, name, None) not in (None, False, ""):
        raise bad_request(
            f"{where}{name} is not supported by this server.", where + name, "unsupported_parameter"
        )


def _text(kind: str, make: Callable[[str], Constraint]) -> Callable[[str], Constraint]:
    def checked(text: str) -> Constraint:
        # What a field left empty means is anybody's guess; it must not mean that there is no constraint.
        if not text:
            raise ConstraintError(kind, f"{kind} is empty; leave it away for any text")
        return make(text)

    return checked


def _structural_tag(value: Any) -> Constraint:
    """Tagged parts, in either spelling or as JSON text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ConstraintError("structural_tag", f"structural_tag is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConstraintError("structural_tag", "structural_tag must be an object")
    if value.get("format") is not None:
        return _newer_tags(value["format"])
    structures, triggers = value.get("structures"), value.get("triggers")
    if structures is None or triggers is None:
        missing = "structures" if structures is None else "triggers"
        raise ConstraintError(missing, f"structural_tag needs structures and triggers; {missing} is missing")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ConstraintError("structural_tag", "structures and triggers must be lists")
    return Constraint.structural_tag([_plain_tag(tag) for tag in structures], triggers)


def _plain_tag(tag: Any) -> Any:
    if isinstance(tag, Tagged):
        tag = msgspec.to_builtins(tag)
    if isinstance(tag, dict) and tag.get("schema") is None:
        return {**tag, "schema": True}
    return tag


def _newer_tags(format: Any) -> Constraint:
    """`{"type": "triggered_tags", "triggers", "tags": [{"begin", "content", "end"}], …}`, or a schema alone."""
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "json_schema":
        return Constraint.json_schema(format.get("json_schema", True))
    if kind != "triggered_tags":
        known = "triggered_tags and json_schema are"
        raise ConstraintError("format", f"a format of type {str(kind)[:80]!r} is not supported, {known}")
    if not isinstance(format.get("tags"), list) or not isinstance(format.get("triggers"), list):
        raise ConstraintError("format", "triggered_tags needs lists of tags and triggers")
    flags = {name: bool(format.get(name)) for name in ("at_least_one", "stop_after_first")}
    return Constraint.structural_tag([_newer_tag(tag) for tag in format["tags"]], format["triggers"], **flags)


def _newer_tag(tag: Any) -> dict[str, Any]:
    content = tag.get("content") if isinstance(tag, dict) else None
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise ConstraintError("content", "the content of a tag must be of type json_schema")
    return {
        "begin": tag.get("begin"),
        "end": tag.get("end", ""),
        "schema": content.get("json_schema", True),
    }


_PLAIN: dict[str, Callable[[Any], Constraint]] = {
    "guided_json": Constraint.json_schema,
    "guided_regex": _text("regex", Constraint.regex),
    "guided_choice": Constraint.choice,
    "guided_grammar": _text("grammar", Constraint.grammar),
    "json_schema": Constraint.json_schema,
    "regex": _text("regex", Constraint.regex),
    "ebnf": _text("grammar", Constraint.grammar),
    "structural_tag": _structural_tag,
}
_OUTPUTS: dict[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": _text("regex", Constraint.regex),
    "choice": Constraint.choice,
    "grammar": _text("grammar", Constraint.grammar),
    "structural_tag": _structural_tag,
}
