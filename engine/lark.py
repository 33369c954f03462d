"""Pieces of grammars in Lark as llguidance reads it, for who puts a grammar together."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from .json_schema import prepare

JSON_SPACE = r" |\n {0,16}"
"""White space that may stand once between two JSON tokens, and neither before nor after the whole: enough for usual
indentation, and no room for a model that says nothing else."""
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": JSON_SPACE,
    # A keyword that is not enforced is refused, whatever the schema itself asks for.
    "lenient": False,
    "coerce_one_of": False,
}


_ESCAPED = re.compile(r"\\.", re.DOTALL)
"""Of which `\\d` are ASCII's digits: other scripts' are of no use to who reads numbers, and each version of Unicode has more."""


def ascii_digits(pattern: str) -> str:
    """A pattern whose `\\d` are 0 to 9."""
    return _ESCAPED.sub(lambda found: "[0-9]" if found.group() == r"\d" else found.group(), pattern)


def json_options(schema: dict[str, Any]) -> dict[str, Any]:
    """How llguidance is to read a schema, which is prepared for it. Raises `ConstraintError` for what would slip by."""
    # Without "u" a key has one spelling only.
    escapes = (
        {"json_allow_general_unicode_escapes": True}
        if prepare(schema)
        else {"json_allowed_escapes": r'"\nrtbf'}
    )
    return _JSON_OPTIONS | escapes


def lark_json(schema: dict[str, Any]) -> str:
    """JSON that fits a schema. Raises `ConstraintError` as `json_options` does."""
    schema = copy.deepcopy(schema)
    options = json_options(schema)
    return "%json " + json.dumps(schema | {"x-guidance": options})


def lark_text(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def lark_regex(pattern: str) -> str:
    """Text that matches a pattern, as a terminal."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, '')}/"


def lark_escaped(text: str) -> str:
    """A text within a terminal's pattern."""
    return re.escape(text).replace("/", r"\/")
