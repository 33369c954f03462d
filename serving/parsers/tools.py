"""Tool calls in a model's text, as Hermes and Qwen models (`<tool_call>{…}</tool_call>`) and Llama 3 models write them.

A call is told once its JSON is whole and has been checked: what looks like a call and is none stays text, to the last
character. White space before a call, and after the last one, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

import msgspec

from .json_object import JsonObjectEnd, read_json
from .parts import Part, Text, ToolCallArguments, ToolCallStart, undecided


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes a call: `open`, an object with name and arguments, `close`."""

    open: str
    close: str
    arguments: str
    """The object's key for the arguments."""
    bare: bool
    """At the beginning of a text, and after another call, an object without the tag is a call too."""
    hints: tuple[str, ...]
    """All of them stand in the source of templates whose models write this way."""
    misses: tuple[str, ...] = ()
    """None of these does."""

    def written_by(self, template: str) -> bool:
        """Whether models with this chat template write calls this way."""
        return all(hint in template for hint in self.hints) and not any(
            miss in template for miss in self.misses
        )


FORMATS = {
    # Some models put their own markup for functions between the same tags.
    "hermes": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        "arguments",
        False,
        ("<tool_call>", "tools"),
        ("<function=", "<arg_key>"),
    ),
    "llama3": ToolFormat("<|python_tag|>", ";", "parameters", True, ("ipython", '"parameters"', "tools")),
}
"""Formats by their names, in the order in which `auto` tries them."""


class _At(Enum):
    START = "start"
    """Where an object without a tag would be a call."""
    TEXT = "text"
    CALL = "call"
    AFTER = "after"
    """Behind a call, where its closing tag may follow."""


class ToolParser:
    """Finds the calls in the text of one answer."""

    def __init__(
        self, style: ToolFormat, tools: Collection[str], *, parallel: bool, new_id: Callable[[], str]
    ) -> None:
        """`tools`: names of the functions on offer; only a call with the tag may name another.

        `parallel` off: only the first call is told, further ones are left out.
        """
        self._style = style
        self._tools = tools
        self._most = None if parallel else 1
        self._new_id = new_id
        self._count = 0
        self._at = _At.START if style.bare else _At.TEXT
        self._held = ""
        self._lead = ""
        """What stands before the object that is being read: white space and the tag."""
        self._object = JsonObjectEnd()
        self._wordless = False
        """Nothing but white space since the last call."""

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while (more := self._step()) is not None:
            parts += more
        return parts

    def finish(self) -> list[Part]:
        rest = self._lead + self._held
        self._lead = self._held = ""
        return [] if self._wordless and not rest.strip() else self._text(rest)

    def _step(self) -> list[Part] | None:
        """What one state finds; None when it takes more text to go on."""
        match self._at:
            case _At.START:
                return self._start()
            case _At.TEXT:
                return self._plain()
            case _At.CALL:
                return self._call()
            case _At.AFTER:
                return self._after()

    def _start(self) -> list[Part] | None:
        begin = self._held.lstrip()
        if not begin:
            return None
        if begin.startswith("{"):
            self._begin_call(lead=len(self._held) - len(begin))
        else:
            self._at = _At.TEXT
        return []

    def _plain(self) -> list[Part] | None:
        before, tag, _ = self._held.partition(self._style.open)
        if not tag:
            before = before[: len(before) - undecided(before, self._style.open)]
        words = before.rstrip()
        self._held = self._held[len(words) :]
        if tag:
            self._begin_call(lead=len(before) - len(words) + len(tag))
        return self._text(words) if words or tag else None

    def _call(self) -> list[Part] | None:
        if self._object.position == 0:
            space = len(self._held) - len(self._held.lstrip())
            self._begin_call(lead=space)
            if not self._held:
                return None
            if not self._held.startswith("{"):
                return self._no_call(0)
        end = self._object.find(self._held)
        if end is None:
            return self._no_call(self._object.position) if self._object.broken else None
        call = _read_call(self._held[:end])
        tagged = bool(self._lead.strip())
        if call is None or not (tagged or call[0] in self._tools):
            return self._no_call(end)
        self._held, self._lead = self._held[end:], ""
        self._at, self._wordless = _At.AFTER, True
        return self._tell(*call)

    def _after(self) -> list[Part] | None:
        close = self._style.close
        rest = self._held.lstrip()
        if close.startswith(rest) and rest != close:
            return None
        if rest.startswith(close):
            self._held = rest.removeprefix(close)
        self._at = _At.START if self._style.bare else _At.TEXT
        return []

    def _begin_call(self, lead: int) -> None:
        self._at = _At.CALL
        self._lead += self._held[:lead]
        self._held = self._held[lead:]
        self._object = JsonObjectEnd()

    def _no_call(self, end: int) -> list[Part]:
        """What was taken for a call, up to `end`, is text."""
        text, self._lead = self._lead + self._held[:end], ""
        self._held = self._held[end:]
        self._at = _At.TEXT
        return self._text(text)

    def _tell(self, name: str, arguments: str) -> list[Part]:
        index = self._count
        if self._most is not None and index >= self._most:
            return []
        self._count += 1
        return [ToolCallStart(index, self._new_id(), name), ToolCallArguments(index, arguments)]

    def _text(self, text: str) -> list[Part]:
        self._wordless = self._wordless and not text.strip()
        return [Text(text)] if text else []


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's JSON, the arguments as they were written; None if it is not one."""
    try:
        call = msgspec.json.decode(text, type=_Call)
        arguments = bytes(call.arguments or call.parameters or b"{}").decode()
        given = read_json(arguments)
        if given is None:
            arguments, given = "{}", {}
        elif isinstance(given, str):  # some models write the object as a text
            arguments, given = given, read_json(given)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return (call.name, arguments) if call.name and isinstance(given, dict) else None
