"""Which parsers read a model's output: chosen once per server, narrowed per call, put together once per choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import reasoning
from .parts import OutputParser, Part, Text, new_call_id
from .reasoning import ThinkParser
from .tools import FORMATS, ToolFormat, ToolParser

REASONING_PARSERS = ("auto", "think", "none")
TOOL_CALL_PARSERS = ("auto", *FORMATS, "none")


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """How a model writes what is not plain text."""

    think: bool = False
    """Reasoning between think tags."""
    tools: ToolFormat | None = None


@dataclass(frozen=True, slots=True)
class CallStyle(OutputStyle):
    """What of its model's style is read in the answers to one call."""

    in_reasoning: bool = False
    """The prompt has opened the reasoning."""
    names: frozenset[str] = frozenset()
    """Functions on offer."""
    parallel: bool = True
    """Whether an answer may have more calls than one."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that mean something even where they are special tokens, which texts leave out otherwise."""
        tags = (reasoning.OPEN, reasoning.CLOSE) if self.think else ()
        return tags if self.tools is None else (*tags, self.tools.open, self.tools.close)


def output_style(template: str, *, reasoning_parser: str, tool_call_parser: str) -> OutputStyle:
    """The style that two settings name; `auto` goes by what the chat template's source mentions."""
    if reasoning_parser == "auto":
        reasoning_parser = "think" if reasoning.CLOSE in template else "none"
    if tool_call_parser == "auto":
        tool_call_parser = next((name for name, kind in FORMATS.items() if kind.written_by(template)), "none")
    return OutputStyle(reasoning_parser == "think", FORMATS.get(tool_call_parser))


def make_parser(style: CallStyle, new_id: Callable[[], str] = new_call_id) -> OutputParser:
    """A parser for one choice of a call with this style; `new_id` gives ids to tool calls."""
    first = ThinkParser(inside=style.in_reasoning) if style.think else _Plain()
    if style.tools is None:
        return first
    return _Chain(first, ToolParser(style.tools, style.names, parallel=style.parallel, new_id=new_id))


class _Plain:
    """Everything is text."""

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class _Chain:
    """What the first parser finds to be text is read by the second."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Part]:
        return self._read(self._first.feed(text))

    def finish(self) -> list[Part]:
        return self._read(self._first.finish()) + self._second.finish()

    def _read(self, parts: list[Part]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            read += self._second.feed(part.text) if isinstance(part, Text) else [part]
        return read
