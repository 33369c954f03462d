"""What an answer's text must match, as a caller states it, and what the loop needs of whoever enforces it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KINDS = ("regex", "json_schema", "json_object", "grammar", "choice", "structural_tag")
MAX_CHARS = 1 << 19
"""Text of a constraint."""
MAX_CHOICES, MAX_CHOICE_CHARS = 4096, 1 << 16
MAX_TAGS = 256


class ConstraintError(ValueError):
    """A constraint that cannot be enforced. `keyword` names what is at fault: a keyword of the schema, or the kind."""

    def __init__(self, keyword: str, message: str) -> None:
        super().__init__(message)
        self.keyword = keyword


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole text of an answer must match; equal contents are equal constraints.

    Made by `Constraint.regex(...)` and its neighbours, which raise `ConstraintError` for what is malformed in itself;
    whether it can be enforced is known once `GrammarCompiler.compile` took it.
    """

    kind: str
    value: str | tuple[str, ...]
    """The pattern, the JSON text of a schema or of structural tags, the grammar, or the choices; empty for json_object."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConstraintError(
                str(self.kind), f"no such constraint: {self.kind!r}; known: {', '.join(KINDS)}"
            )
        if self.kind == "choice":
            _check_choices(self.value)
            for text in self.value:
                _check_unicode("choice", text)
        elif not isinstance(self.value, str):
            raise ConstraintError(self.kind, f"{self.kind} must be text, not {type(self.value).__name__}")
        elif len(self.value) > MAX_CHARS:
            raise ConstraintError(
                self.kind, f"{self.kind} has {len(self.value)} characters, at most {MAX_CHARS} are allowed"
            )
        else:
            _check_unicode(self.kind, self.value)

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """All of the text matches the pattern: Unicode (but for `\\d`, which is 0-9), no look-around, no back references.

        A pattern with a lazy quantifier (`.*?`) lets the text end at its first possible end.
        """
        return cls("regex", pattern)

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any] | bool) -> Constraint:
        """A JSON value that is valid under the schema (JSON text or the object it stands for), white space bounded."""
        if not isinstance(schema, str):
            schema = _to_json("json_schema", schema)
        parsed = _from_json("json_schema", schema)
        if parsed is True:
            parsed = {}
        if not isinstance(parsed, dict):
            raise ConstraintError("json_schema", f"a JSON schema is an object, not {_shown(schema)}")
        # The order of the keys stays: it is the order of an object's properties in the answer.
        return cls("json_schema", _to_json("json_schema", parsed))

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls("json_object", "")

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """A context-free grammar: Lark with a rule `start`, or GBNF as llama.cpp writes it with a rule `root`."""
        return cls("grammar", text)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Constraint:
        """One of these texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise ConstraintError("choice", f"choice must be a list of texts, not {_shown(choices)}")
        return cls("choice", tuple(choices))

    @classmethod
    def structural_tag(
        cls,
        tags: Sequence[Mapping[str, Any]],
        triggers: Sequence[str],
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> Constraint:
        """Free text with tagged parts, such as tool calls.

        A tag is `{"begin": text, "schema": JSON schema, "end": text}`. As soon as the text has one of the triggers, one of
        the tags that begin with it must follow, whole. `at_least_one`: the answer ends with a tag, not before;
        `stop_after_first`: it ends with the first one.
        """
        value = {
            "tags": [_checked_tag(tag, triggers) for tag in _tags(tags)],
            "triggers": list(triggers),
            "at_least_one": bool(at_least_one),
            "stop_after_first": bool(stop_after_first),
        }
        return cls("structural_tag", _to_json("structural_tag", value))


class Matcher(Protocol):
    """Follows one answer, token by token. Not thread safe: the loop's thread alone calls it."""

    @property
    def ended(self) -> bool:
        """The text is complete and nothing can be added to it."""
        ...

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that must come next, whatever the model says; empty where there is a choice."""
        ...

    @property
    def mask(self) -> NDArray[np.int32]:
        """i32[ceil(V / 32)]: bit `i % 32` of word `i // 32` allows token i to come next. Never changed once handed out."""
        ...

    def advance(self, token_id: int) -> None:
        """The token was added to the answer; not called with one that ends it.

        Raises `ConstraintError` when it is not allowed, or what may follow cannot be found within the limits.
        """
        ...


def _check_choices(value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise ConstraintError("choice", f"choice must hold texts, not {_shown(value)}")
    if not (1 <= len(value) <= MAX_CHOICES):
        raise ConstraintError("choice", f"choice has {len(value)} entries; 1 to {MAX_CHOICES} are allowed")
    if sum(map(len, value)) > MAX_CHOICE_CHARS:
        raise ConstraintError("choice", f"the texts of choice exceed {MAX_CHOICE_CHARS} characters together")


def _check_unicode(keyword: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConstraintError(keyword, f"{keyword} is not valid Unicode: {error.reason}") from None


def _tags(tags: object) -> Sequence[Mapping[str, Any]]:
    if isinstance(tags, (str, bytes)) or not isinstance(tags, Sequence):
        raise ConstraintError("structural_tag", f"tags must be a list of objects, not {_shown(tags)}")
    if not (1 <= len(tags) <= MAX_TAGS):
        raise ConstraintError(
            "structural_tag", f"there are {len(tags)} structural tags; 1 to {MAX_TAGS} are allowed"
        )
    return tags


def _checked_tag(tag: object, triggers: Sequence[str]) -> dict[str, Any]:
    if not isinstance(tag, Mapping):
        raise ConstraintError("structural_tag", f"a tag is an object, not {_shown(tag)}")
    begin, end = tag.get("begin"), tag.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ConstraintError("structural_tag", "a tag's begin and end must be texts")
    if isinstance(triggers, str) or not all(isinstance(t, str) and t for t in triggers):
        raise ConstraintError("triggers", "triggers must be a list of texts that are not empty")
    if not any(begin.startswith(trigger) for trigger in triggers):
        raise ConstraintError("triggers", f"no trigger is a beginning of the tag {_shown(begin)}")
    schema = Constraint.json_schema(tag.get("schema", True)).value
    assert isinstance(schema, str)
    return {"begin": begin, "schema": json.loads(schema), "end": end}


def _to_json(keyword: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(keyword, f"{keyword} cannot be written as JSON: {error}") from None


def _from_json(keyword: str, text: str) -> Any:
    if len(text) > MAX_CHARS:
        raise ConstraintError(
            keyword, f"{keyword} has {len(text)} characters, at most {MAX_CHARS} are allowed"
        )
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConstraintError(keyword, f"{keyword} is not valid JSON: {error}") from None
    except RecursionError:
        raise ConstraintError(keyword, f"{keyword} is nested too deeply") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
