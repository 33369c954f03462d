"""Reasoning between tags, as Qwen3 and DeepSeek models write it: `<think>…</think>` before the answer."""

from __future__ import annotations

from enum import Enum

from .parts import Part, Reasoning, Text, undecided

OPEN, CLOSE = "<think>", "</think>"


class _At(Enum):
    START = "start"
    INSIDE = "inside"
    GAP = "gap"
    ANSWER = "answer"


class ThinkParser:
    """Tells reasoning, which only the beginning of a text can be, from the answer. White space next to the tags is dropped.

    A tag that never closes makes all of the text reasoning.
    """

    def __init__(self, *, inside: bool = False) -> None:
        """`inside`: the prompt has opened the tag."""
        self._at = _At.INSIDE if inside else _At.START
        self._begun = False
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if self._at is _At.START:
            self._look_for_opening()
        if self._at is _At.INSIDE:
            parts += self._reasoning()
        if self._at is _At.GAP:
            self._held = self._held.lstrip()
            self._at = _At.ANSWER if self._held else _At.GAP
        if self._at is _At.ANSWER and self._held:
            parts.append(Text(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._at is _At.START:
            return [Text(held)] if held else []
        return [Reasoning(held)] if held and self._at is _At.INSIDE else []

    def _look_for_opening(self) -> None:
        begin = self._held.lstrip()
        if begin.startswith(OPEN):
            self._at, self._held = _At.INSIDE, begin.removeprefix(OPEN)
        elif not OPEN.startswith(begin):
            self._at = _At.ANSWER

    def _reasoning(self) -> list[Part]:
        if not self._begun:
            self._held = self._held.lstrip()
            self._begun = bool(self._held)
        inside, close, rest = self._held.partition(CLOSE)
        if close:
            self._at = _At.GAP
        else:
            inside = inside[: len(inside) - undecided(inside, CLOSE)]
        # White space may turn out to stand before the closing tag.
        inside = inside.rstrip()
        self._held = rest if close else self._held[len(inside) :]
        return [Reasoning(inside)] if inside else []


def ends_open(prompt: str) -> bool:
    """Whether a prompt ends with the opening tag, so that the model goes on inside."""
    return prompt.rstrip().endswith(OPEN)


def ends_closed(prompt: str) -> bool:
    """Whether a prompt ends with the closing tag, so that the model goes on with the answer."""
    return prompt.rstrip().endswith(CLOSE)


def stays_open(message: str) -> bool:
    """Whether the reasoning that a message begins has not ended in it."""
    return message.lstrip().startswith(OPEN) and CLOSE not in message
