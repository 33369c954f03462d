"""Programs that are written down by calls: `with assistant(): user(…); gen(…)` records for the thread that runs it.

Inside such a block every part that is made counts, unless it becomes part of another one: `user("a " + gen("x"))` is
one message. The block's role is that of loose parts: `user(…)` within `with assistant():` is a message of its own, and a
`gen` after it goes into the assistant's next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from .errors import ProgramError

if TYPE_CHECKING:
    from .expr import Expr

_ExprT = TypeVar("_ExprT", bound="Expr")


@dataclass(slots=True, eq=False)
class Block:
    """A `with assistant():` and the like, while it is open."""

    role: str
    where: str


@dataclass(slots=True)
class Recording:
    """What one thread has written down and not run yet."""

    blocks: list[Block] = field(default_factory=list)
    entries: list[tuple[Block, Expr]] = field(default_factory=list)
    """Parts with the block that they stand in."""


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)
_in_function: ContextVar[bool] = ContextVar("in_function", default=False)


def record(expr: _ExprT) -> _ExprT:
    """Notes a new part, if the thread is recording."""
    recording = _recording.get()
    if recording is not None and recording.blocks:
        recording.entries.append((recording.blocks[-1], expr))
    return expr


def adopt(expr: Expr) -> None:
    """The part has become part of another one."""
    recording = _recording.get()
    if recording is None:
        return
    for at in range(len(recording.entries) - 1, -1, -1):
        if recording.entries[at][1] is expr:
            del recording.entries[at]
            return


class RoleBlock:
    """What `assistant()` without a content is: for `with`."""

    def __init__(self, role: str, where: str) -> None:
        self._block = Block(role, where)
        self._before = 0

    def __enter__(self) -> None:
        block = self._block
        if _in_function.get():
            raise ProgramError(
                f"inside a @function program write `with s.{block.role}():` and add to s", block.where
            )
        recording = _recording.get()
        if recording is None:
            recording = Recording()
            _recording.set(recording)
        if recording.blocks:
            outer = recording.blocks[-1]
            raise ProgramError(
                f"`with {block.role}():` stands inside `with {outer.role}():` of {outer.where};"
                f" messages do not nest, write {block.role}(…)",
                block.where,
            )
        recording.blocks.append(block)
        self._before = len(recording.entries)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        recording = _recording.get()
        assert recording is not None
        recording.blocks.remove(self._block)
        if kind is not None:
            # Half a block must not be part of whatever is run next.
            del recording.entries[self._before :]


def take_recorded(where: str) -> list[tuple[Block, Expr]]:
    """What this thread has recorded since the last time. Raises `ProgramError` if that is nothing, or a block is open."""
    recording = _recording.get()
    if recording is not None and recording.blocks:
        block = recording.blocks[-1]
        raise ProgramError(
            f"run() inside `with {block.role}():` of {block.where}; run it after the block", where
        )
    if recording is None or not recording.entries:
        raise ProgramError(
            "there is nothing to run: calls of gen(…), user(…) and the like are recorded inside"
            " `with assistant():`, by the thread that calls run()",
            where,
        )
    entries, recording.entries = recording.entries, []
    return entries


@contextmanager
def in_function() -> Iterator[None]:
    """While a `@function` program runs: nothing is recorded, whoever called it."""
    recording, inside = _recording.set(None), _in_function.set(True)
    try:
        yield
    finally:
        _in_function.reset(inside)
        _recording.reset(recording)
