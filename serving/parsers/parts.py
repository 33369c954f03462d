"""What a model's text consists of, and what reads it: parts in the order in which they were written.

Every protocol translates the same parts. They do not depend on how the text was cut into pieces, so a stream and a
whole answer cannot disagree.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Some of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Calls are numbered from 0 within an answer; `ToolCallArguments` with the same index follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Some of a call's arguments; the pieces of one call join to the JSON text of an object."""

    index: int
    text: str


_PIECE = 4096
"""Characters that `parse_whole` reads at a time."""

Part = Text | Reasoning | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Reads the text of one choice as it comes in."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain once this text has been added."""
        ...

    def finish(self) -> list[Part]:
        """The rest, once no more text comes; to be called once."""
        ...


@dataclass(slots=True)
class ToolCall:
    """A whole call; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """An answer put together from its parts."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        parts = list(parts)
        # Joined first: a long text grows by few pieces, not by each.
        self.text += "".join(part.text for part in parts if isinstance(part, Text))
        self.reasoning += "".join(part.text for part in parts if isinstance(part, Reasoning))
        for part in parts:
            match part:
                case ToolCallStart(_, id, name):
                    self.calls.append(ToolCall(id, name))
                case ToolCallArguments(index, text):
                    self.calls[index].arguments += text
                case _:
                    pass


def parse_whole(parser: OutputParser, text: str) -> Answer:
    """The answer that a whole text is."""
    answer = Answer()
    # Parsers copy what they hold with every tag that they find: pieces keep that short.
    for start in range(0, len(text), _PIECE):
        answer.add(parser.feed(text[start : start + _PIECE]))
    answer.add(parser.finish())
    return answer


def new_call_id() -> str:
    """An id for a tool call that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def undecided(text: str, tag: str) -> int:
    """Length of the longest tail of `text` that begins `tag` without completing it."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)
