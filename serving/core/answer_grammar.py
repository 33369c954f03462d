"""One grammar for all that an answer may consist of: reasoning, calls of functions, and text of a certain form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...engine.constraint import Constraint, ConstraintError
from ...engine.lark import ascii_digits, lark_escaped, lark_json, lark_regex, lark_text
from ...engine.lazy_regex import split_lazy
from ..http.errors import bad_request
from ..parsers.reasoning import CLOSE, OPEN
from ..parsers.tools import ToolFormat
from .answer_form import AnswerForm, make_form, refused
from .tool_fields import ToolChoice

_ANY = r"/(.|\n)*/"
_NO_CALL = r"(\s*[^{\s](.|\n)*)?"
"""Text where an object at the beginning would be a call."""


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What shapes the answers to one conversation, in Lark."""

    format: ToolFormat | None
    """How the model writes calls; None: it may make none."""
    tools: list[dict[str, Any]]
    """Functions on offer, in OpenAI's chat form."""
    choice: ToolChoice
    parallel: bool
    """Whether an answer may have several calls."""
    reasoning: Literal["none", "may", "inside"]
    """Whether reasoning may come first, or has been opened by the prompt."""
    special_ids: Callable[[Iterable[str]], frozenset[int]]
    """Ids of those texts that are special tokens, as `Tokenizer.special_ids`."""
    parameters: str
    """Where the body's tools have the schemas of their arguments."""

    def form(self, asked: AnswerForm | None) -> AnswerForm | None:
        """What the answer must match, given what is asked of its text; None = any text will do.

        Raises `ApiError` 400 for what cannot be put together, or is malformed.
        """
        held = self.format is not None and self._holds_calls()
        if not held and (asked is None or (self.format is None and self.reasoning == "none")):
            return asked
        if asked is not None and asked.constraint.kind in ("grammar", "structural_tag"):
            # These stand for all of the text, and leave no room beside them.
            self._check_alone(asked, held)
            return asked
        if asked is None and not self._forced:
            rules = self._free_text()
        else:
            rules = self._body(asked)
        text = "\n".join([*rules, *self._calls()]) if self.format is not None else "\n".join(rules)
        param = asked.param if asked is not None else "tool_choice" if self._forced else "tools"
        form = make_form(param, lambda: Constraint.grammar(text))
        return replace(form, parts=self._parts(asked))

    @property
    def _forced(self) -> bool:
        return self.choice.mode == "required"

    def _holds_calls(self) -> bool:
        """Whether calls have to be of a certain form."""
        strict = any(tool["function"].get("strict") for tool in self.tools)
        return self._forced or self.choice.names is not None or strict

    def _check_alone(self, asked: AnswerForm, held: bool) -> None:
        kind = asked.constraint.kind
        if held:
            message = f"{asked.param} and the tools each say what the answer must match: {kind} leaves no room for calls."
            raise bad_request(message, asked.param)
        if self.reasoning == "inside" and kind == "grammar":
            message = (
                f"{asked.param}: the prompt has opened the reasoning, for which a grammar leaves no room."
            )
            raise bad_request(message, asked.param)

    # Rules.

    def _body(self, asked: AnswerForm | None) -> list[str]:
        """Nothing but calls, where they are a must; else calls or an answer of the form that is asked for."""
        parts = [] if self.format is None else ["calls"]
        rules: list[str] = []
        if asked is not None and not self._forced:
            parts.append("answer")
            rules += _answer(asked)
        start = " | ".join(parts)
        match self.reasoning:
            case "none":
                return [f"start: {start}", *rules]
            case "may":
                opened = f"think: {self._tag(OPEN)} thought"
                return [f"start: think ({start}) | {start}", opened, *self._thought(), *rules]
            case "inside":
                return [f"start: thought ({start})", *self._thought(), *rules]

    def _free_text(self) -> list[str]:
        """Text as the model likes, in which a call that has begun must be one."""
        assert self.format is not None
        rules = self._until("begun", self.format.open, _NO_CALL if self.format.bare else _ANY[1:-1])
        if self.format.bare:
            start = f"calls | begun calls | /{_NO_CALL}/"
        elif self.parallel:
            start = f"(begun rest)* {_ANY}"
        else:
            start = f"begun rest | {_ANY}"
        if self.reasoning == "inside":
            return [f"start: thought body\nbody: {start}", *self._thought(), *rules]
        return [f"start: {start}", *rules]

    def _thought(self) -> list[str]:
        return [*self._until("closed", CLOSE, _ANY[1:-1]), r"thought: closed /[\n ]{0,4}/"]

    def _calls(self) -> list[str]:
        """`calls`: one or more, back to back; `rest`: one without its opening tag."""
        assert self.format is not None
        functions = [(i, tool["function"]) for i, tool in enumerate(self.tools) if self._on_offer(tool)]
        rules = [self._function(i, function) for i, function in functions]
        rules.append("function: " + " | ".join(f"function_{i}" for i, _ in functions))
        if self.format.bare:
            more = ' ("; " function)*' if self.parallel else ""
            return [*rules, f"calls: function{more}"]
        more = r" (/\n{0,2}/ call)*" if self.parallel else ""
        rest = rf"rest: /\n?/ function /\n?/ {self._tag(self.format.close)}"
        return [*rules, rest, f"call: {self._tag(self.format.open)} rest", f"calls: call{more}"]

    def _function(self, number: int, function: dict[str, Any]) -> str:
        """A call's object, token by token of its JSON, so that another object may stand where it may."""
        assert self.format is not None
        name = lark_text(json.dumps(function["name"]))
        key = lark_text(json.dumps(self.format.arguments))
        arguments = _json(self._param(number), self._arguments(function))
        return f'function_{number}: "{{" "\\"name\\"" ": " {name} ", " {key} ": " {arguments} "}}"'

    def _arguments(self, function: dict[str, Any]) -> dict[str, Any]:
        if not self._held_to_schema(function):
            return {"type": "object"}
        schema = function.get("parameters")
        if schema is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return schema if "type" in schema else {**schema, "type": "object"}

    def _held_to_schema(self, function: dict[str, Any]) -> bool:
        return self._forced or bool(function.get("strict"))

    def _on_offer(self, tool: dict[str, Any]) -> bool:
        names = self.choice.names
        return names is None or tool["function"]["name"] in names

    def _until(self, name: str, tag: str, text: str) -> list[str]:
        """A rule for text up to the first `tag`, and with it."""
        if self.special_ids([tag]):
            return [f"{name}: /{text}/ {self._tag(tag)}"]
        return [f"{name}[lazy]: /{text}{lark_escaped(tag)}/"]

    def _tag(self, tag: str) -> str:
        """A tag, as the special token that it may be."""
        ids = self.special_ids([tag])
        return f"<[{min(ids)}]>" if ids else lark_text(tag)

    def _param(self, number: int) -> str:
        return f"tools[{number}]{self.parameters}"

    def _parts(self, asked: AnswerForm | None) -> tuple[tuple[str, Constraint], ...]:
        parts = [] if asked is None else [(asked.param, asked.constraint)]
        for i, tool in enumerate(self.tools):
            if self.format is None or not self._on_offer(tool) or not self._held_to_schema(tool["function"]):
                continue
            param = self._param(i)
            try:
                parts.append((param, Constraint.json_schema(self._arguments(tool["function"]))))
            except ConstraintError as error:
                raise refused(param, error) from None
        return tuple(parts)


def _answer(asked: AnswerForm) -> list[str]:
    """`answer`: a text of the form that was asked for."""
    value = asked.constraint.value
    if isinstance(value, tuple):
        return ["answer: " + " | ".join(map(lark_text, value))]
    match asked.constraint.kind:
        case "json_schema":
            return ["answer: " + _json(asked.param, json.loads(value))]
        case "json_object":
            return ["answer: " + _json(asked.param, {"type": "object"})]
        case kind:
            assert kind == "regex"
            return _answer_regex(ascii_digits(value))


def _json(param: str, schema: dict[str, Any]) -> str:
    try:
        return lark_json(schema)
    except ConstraintError as error:
        raise refused(param, error) from None


def _answer_regex(pattern: str) -> list[str]:
    parts = split_lazy(pattern)
    if parts is None:
        return ["answer: " + lark_regex(pattern)]
    head, tail = parts
    rules = [f"answer_head[lazy]: {lark_regex(head)}"]
    if not tail:
        return ["answer: answer_head", *rules]
    return ["answer: answer_head answer_tail", *rules, f"answer_tail: {lark_regex(tail)}"]
