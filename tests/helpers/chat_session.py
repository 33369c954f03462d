"""A conversation of `tierax chat` without a terminal, and a backend for it without a model."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

from tierax.cli.chat import Chat, Terminal
from tierax.cli.chat_backends import Message, Turn


class Scripted:
    """A backend that answers with the number of messages, a token a letter and a tenth of a second each."""

    name = "scripted"

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[list[Message]] = []
        self.fail: BaseException | None = None

    def answer(self, messages: Sequence[Message], turn: Turn) -> None:
        self.asked.append(list(messages))
        self.now += 0.25
        for letter in f"got {len(messages)}":
            turn.add(letter)
            if self.fail is not None and letter == "t":
                raise self.fail
            self.now += 0.1
        turn.finish_reason = "stop"
        turn.prompt_tokens, turn.output_tokens, turn.cached_tokens = 40, 5, 24
        turn.by_tier = {"device": 8, "host": 16, "disk": 0}

    def close(self) -> None:
        pass


def converse(backend: Any, *lines: str, system: str | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a piped chat."""
    terminal = Terminal(io.StringIO("".join(f"{line}\n" for line in lines)), io.StringIO(), io.StringIO())
    clock = (lambda: backend.now) if isinstance(backend, Scripted) else time.perf_counter
    code = Chat(backend, terminal, system, clock).run()
    assert isinstance(terminal.out, io.StringIO)
    assert isinstance(terminal.err, io.StringIO)
    return code, terminal.out.getvalue(), terminal.err.getvalue()
