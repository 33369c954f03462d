"""Finds where a JSON object ends in a text that arrives in pieces, and reads JSON that a model has written."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import msgspec

_BETWEEN = re.compile(r"[\s\w:,.+-]*")
_QUOTED = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


class JsonObjectEnd:
    """Looks at every character once, at brackets and quotes only: whether it is JSON is for a decoder to say."""

    def __init__(self) -> None:
        self.position = 0
        """How far the text has been looked at."""
        self.broken = False
        """What stands at `position` cannot belong to an object."""
        self._depth = 0
        self._quoted = False

    def find(self, text: str) -> int | None:
        """The end of the object that `text` begins with; None if it is broken or goes on.

        Each call gets the text of the one before and what has come since.
        """
        while not self.broken:
            found = (_QUOTED if self._quoted else _BETWEEN).match(text, self.position)
            assert found is not None
            self.position = found.end()
            if self.position == len(text):
                return None
            char = text[self.position]
            if self._quoted and char == "\\":
                return None  # what it escapes has not come yet
            if char == '"':
                self._quoted = not self._quoted
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            else:
                self.broken = True
                return None
            self.position += 1
            if self._depth == 0:
                return self.position
        return None


def read_json(text: str) -> Any:
    """What a JSON text stands for. Raises `ValueError` or `RecursionError`.

    Numbers that are too large for a float, which a schema without bounds allows, become the largest one.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if "out of range" not in str(error):
            raise ValueError(str(error)) from None
        return json.loads(text, parse_float=_float, parse_constant=_no_constant)


def _float(text: str) -> float:
    most = sys.float_info.max
    return max(-most, min(most, float(text)))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
