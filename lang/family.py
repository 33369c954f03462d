"""What the states of one run have in common, and what each has its work done by."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .backend import Backend, Completion, LoopThread
from .budget import Budget
from .expr import Sampling
from .feed import Feed, Piece
from .interpreter import Choice

if TYPE_CHECKING:
    from .state import ProgramState


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a program, all its branches and choices together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came out of the cache."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached_tokens


class Variable:
    """A place that the model fills in; known once the backend has come to it."""

    def __init__(self, name: str | None, feed: Feed) -> None:
        self.name = name
        self._feed = feed
        self.value: Future[tuple[str, Completion | Choice]] = Future()
        self._shown = ""

    def show(self, piece: str) -> None:
        self._shown += piece
        self._feed.add(Piece(self.name, piece))

    def fill(self, text: str, meta: Completion | Choice) -> None:
        self.value.set_result((text, meta))
        self._feed.add(Piece(self.name, text[len(self._shown) :], last=True))

    def wait(self) -> str:
        """The text. Raises what the program failed by."""
        return self.value.result()[0]

    def meta(self) -> Completion | Choice:
        """How the text came about. Raises what the program failed by."""
        return self.value.result()[1]


class Line:
    """Does the work of one state in order, in the backend's loop."""

    def __init__(self, loop: LoopThread, cancelled: Callable[[], None]) -> None:
        """`cancelled` is called if it ends early, whoever ended it."""
        self._loop = loop
        self._work: asyncio.Queue[Callable[[], Awaitable[None]] | None] = asyncio.Queue()
        self._done = loop.submit(self._run())
        self._done.add_done_callback(lambda done: cancelled() if done.cancelled() else None)

    def put(self, work: Callable[[], Awaitable[None]] | None) -> None:
        """Something more to do; None: nothing more will come."""
        self._loop.call(self._work.put_nowait, work)

    def cancel(self) -> None:
        """Ends at once."""
        self._done.cancel()

    def join(self) -> None:
        """Waits for the end, after a `put(None)` or a `cancel`."""
        with suppress(CancelledError):
            self._done.result()

    async def _run(self) -> None:
        while (work := await self._work.get()) is not None:
            await work()


class Family:
    """The states of one run: the program's own and its branches, with what they share."""

    def __init__(self, backend: Backend, sampling: Sampling, budget: Budget) -> None:
        self.backend, self.sampling, self.budget = backend, sampling, budget
        self.first_answer = threading.Event()
        """Some part of an answer has come, so that the prompt before it is computed; or no answer will."""
        self._states: list[ProgramState] = []
        self._lock = threading.Lock()

    def add(self, state: ProgramState) -> None:
        with self._lock:
            self._states.append(state)

    def finish(self) -> None:
        """Waits until all that was added has been carried out. Raises the first error of all states."""
        for state in self._members():
            state.line.put(None)
        for state in self._members():
            state.line.join()
        error = next((state.error for state in self._members() if state.error is not None), None)
        if error is not None:
            self._members()[0].stop(error)
        self._ended()
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Ends everything at once."""
        for state in self._members():
            state.line.cancel()
        self._ended()

    def usage(self) -> Usage:
        metas = [meta for state in self._members() for meta in state.metas]
        return Usage(
            sum(meta.prompt_tokens for meta in metas),
            sum(meta.completion_tokens for meta in metas if isinstance(meta, Completion)),
            sum(meta.cached_tokens for meta in metas),
        )

    def _ended(self) -> None:
        self.first_answer.set()
        for state in self._members():
            state.end()

    def _members(self) -> list[ProgramState]:
        with self._lock:
            return list(self._states)
