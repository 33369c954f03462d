"""What can go wrong with a program, said with the line of the program that asked for it."""

from __future__ import annotations

import os
import sys

_HERE = os.path.join(os.path.dirname(__file__), "")


class BackendError(Exception):
    """A backend could not do what it was asked for: unreachable, refused, or broken off. The message is for the user."""


class ProgramError(RuntimeError):
    """A program cannot go on. The message begins with `where`, the file and line that asked for what failed."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message if where is None else f"{where}: {message}")
        self.where = where


class BudgetError(ProgramError):
    """A program has used up the tokens that it was given."""


def caller() -> str:
    """`file:line` of the nearest frame outside this package's language: the user's program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
