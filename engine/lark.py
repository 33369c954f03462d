"""Pieces of grammars in Lark as llguidance reads it, for who puts a grammar together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

JSON_SPACE = r" |\n {0,16}"
"""White space that may stand once between two JSON tokens, and neither before nor after the whole: enough for usual
indentation, and no room for a model that says nothing else."""
JSON_OPTIONS: Mapping[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": JSON_SPACE,
    "json_allow_general_unicode_escapes": True,
    # A keyword that is not enforced is refused, whatever the schema itself asks for.
    "lenient": False,
    "coerce_one_of": False,
}


def lark_text(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def lark_json(schema: Mapping[str, Any]) -> str:
    """JSON that fits a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)


def lark_regex(pattern: str) -> str:
    """Text that matches a pattern, as a terminal."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, '')}/"


def lark_escaped(text: str) -> str:
    """A text within a terminal's pattern."""
    return re.escape(text).replace("/", r"\/")
