"""An answer as a row of blocks (thinking, text, calls), for protocols whose streams tell of each by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ...engine.request import TokenLogprob
from ..parsers.parts import OutputParser, Part, Reasoning, Text, ToolCallArguments, ToolCallStart
from .generation import Event

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block; `text` is the thought, the text, or a call's arguments as JSON."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of a text's tokens."""


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a block: it was opened, it grew by `text` and `logprobs`, or it was closed."""

    kind: Literal["opened", "grew", "closed"]
    block: Block
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Blocks:
    """Puts the blocks of one choice together, and tells of every change; the changes alone give the same blocks."""

    def __init__(self, parser: OutputParser):
        self.blocks: list[Block] = []
        self.token_ids: list[int] = []
        self.raw_text = ""
        """What the model wrote, before it was parsed."""
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        """None until `close`."""
        self._parser = parser
        self._open: Block | None = None
        self._pending: list[TokenLogprob] = []

    def add(self, event: Event) -> Iterator[Change]:
        """Takes over an event."""
        self.token_ids += event.token_ids
        self.raw_text += event.text
        parts = self._parser.feed(event.text) if event.text else []
        if event.finish_reason is not None:
            parts += self._parser.finish()
        before = self._open
        self._pending += event.logprobs
        for part in parts:
            yield from self._take(part, event)
        if self._open is not None and self._open is before and self._open.kind == "reasoning":
            self.reasoning_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            yield from self.close(event.finish_reason)

    def close(self, finish_reason: str) -> Iterator[Change]:
        """Ends the answer where it is."""
        self.finish_reason = finish_reason
        if self._open is not None and self._open.kind == "text" and self._pending:
            yield self._grow("")
        yield from self._close()

    def _take(self, part: Part, event: Event) -> Iterator[Change]:
        match part:
            case Text(text):
                yield from self._written("text", text, event)
            case Reasoning(text):
                yield from self._written("reasoning", text, event)
            case ToolCallStart(id=call_id, name=name):
                yield from self._begin("call", event, call_id, name)
            case ToolCallArguments(text=text):
                yield self._grow(text)

    def _written(self, kind: Kind, text: str, event: Event) -> Iterator[Change]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind, event)
        yield self._grow(text)

    def _begin(self, kind: Kind, event: Event, call_id: str = "", name: str = "") -> Iterator[Change]:
        if self.blocks:
            # Tokens before this event's belong to what ends here, or to tags in between.
            self._pending = list(event.logprobs)
        yield from self._close()
        self._open = Block(len(self.blocks), kind, call_id=call_id, name=name)
        self.blocks.append(self._open)
        yield Change("opened", self._open)

    def _grow(self, text: str) -> Change:
        block = self._open
        assert block is not None
        logprobs, self._pending = (self._pending, []) if block.kind == "text" else ([], [])
        block.text += text
        block.logprobs += logprobs
        return Change("grew", block, text, logprobs)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield Change("closed", self._open)
            self._open = None
