"""The state of a running program: what `s` is in `def f(s): s += gen("x")`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from .backend import Completion
from .branches import Branches
from .errors import ProgramError, caller
from .expr import Begin, End, Expr, Message, as_expr, named_parts
from .family import Family, Line, Usage, Variable
from .feed import Feed, Piece
from .interpreter import Choice, Interpreter
from .transcript import Transcript


class ProgramState:
    """Adding (`s += "text"`, `s += gen("x")`) returns at once; reading (`s["x"]`, `s.text()`) waits for what it needs.

    Reading raises `ProgramError` if the program has failed before, or if there is no such name.
    """

    def __init__(self, family: Family, parent: Future[Transcript] | None = None) -> None:
        self.family = family
        self.feed = Feed()
        self.error: ProgramError | None = None
        """Why the program ended early; None while there is no reason to know of."""
        self.ended = False
        """Nothing more can be added."""
        self.runner: threading.Thread | None = None
        """The thread that runs the program's function, if that is not the caller's."""
        self.ret_value: Any = None
        """What the program's function returned."""
        self.metas: list[Completion | Choice] = []
        """Of all answers so far."""
        self._variables: dict[str, list[Variable]] = {}
        self._named = threading.Condition()
        self._gathered: dict[str, list[str]] = {}
        self._open: list[Future[Any]] = []
        """What others may be waiting for."""
        self._interpreter = Interpreter(
            family.backend, family.budget, family.sampling, Transcript(), self._show_text
        )
        self.line = Line(family.backend.loop, lambda: self.stop(ProgramError("the program was cancelled")))
        family.add(self)
        if parent is not None:
            self.line.put(lambda: self._inherit(parent))

    # What programs do.

    def __iadd__(self, other: Expr | str | None) -> ProgramState:
        if other is not None:
            self.add(as_expr(other), caller())
        return self

    def __getitem__(self, name: str) -> Any:
        """The text of the last place with that name; a list of texts where `join` has gathered them from branches.

        While the program runs in a thread of its own, a name that it has not come to yet is waited for.
        """
        if name in self._gathered and name not in self._variables:
            return self._gathered[name]
        return self._last(name).wait()

    def __contains__(self, name: str) -> bool:
        return name in self._variables or name in self._gathered

    def get_var(self, name: str) -> Any:
        """The same as `s[name]`."""
        return self[name]

    def get_all(self, name: str) -> list[str]:
        """The texts of all places with that name, in order."""
        self._last(name)
        return [variable.wait() for variable in self._variables[name]]

    def get_meta_info(self, name: str) -> Any:
        """How the text came about: of a `gen` a `Completion`, with its tokens and what was cached; of a `select` a
        `Choice`, with the scores."""
        return self._last(name).meta()

    def names(self) -> list[str]:
        """Names that were added so far, in order."""
        return list(self._variables)

    def text(self) -> str:
        """All of the text so far, chat template included."""
        self.sync()
        return self._interpreter.transcript.text

    def messages(self) -> list[dict[str, str]]:
        """The messages so far, in OpenAI's form."""
        self.sync()
        return self._interpreter.transcript.messages

    def token_ids(self) -> list[int]:
        """The tokens that the model knows so far."""
        self.sync()
        return list(self._interpreter.transcript.ids)

    def usage(self) -> Usage:
        """Tokens of the whole run so far, branches included."""
        self.sync()
        return self.family.usage()

    def sync(self) -> None:
        """Waits until all that was added has been carried out."""
        reached: Future[None] = Future()

        async def tell() -> None:
            _settle(reached, self.error)

        if not self.ended:
            self._do(tell, reached)
            reached.result()
        if self.error is not None:
            raise self.error

    def fork(self, size: int = 1) -> Branches:
        """So many branches that go on from here by themselves, at the same time; they share what is cached up to here."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ProgramError(f"fork takes a number of branches, at least 1, not {size!r}", caller())
        self._check_running()
        where = caller()
        here: Future[Transcript] = Future()

        async def snapshot() -> None:
            if self.error is not None:
                return
            try:
                transcript = await self._interpreter.branch(where)
            except ProgramError as error:
                self.stop(error)
            else:
                with suppress(InvalidStateError):
                    here.set_result(transcript)

        self._do(snapshot, here)
        return Branches(self, [ProgramState(self.family, here) for _ in range(size)])

    def gather(self, name: str, texts: list[str]) -> None:
        """The texts that branches have under a name; unless it is one of this state's own, it gives them."""
        self._gathered[name] = texts

    def copy(self) -> ProgramState:
        """One branch."""
        return self.fork(1)[0]

    def system(self, content: Expr | str | None = None) -> _Within:
        """`with s.system(): s += …`, or a whole message."""
        return self._message("system", content, caller())

    def user(self, content: Expr | str | None = None) -> _Within:
        """`with s.user(): s += …`, or a whole message."""
        return self._message("user", content, caller())

    def assistant(self, content: Expr | str | None = None) -> _Within:
        """`with s.assistant(): s += gen(…)`, or a whole message."""
        return self._message("assistant", content, caller())

    # Streaming.

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text in pieces as it comes, to the program's end; with a `name` that of the first such place only.

        Raises `ProgramError` when the program fails, and at its end if there was no such place.
        """
        for piece in self.feed.pieces():
            if name is None or piece.name == name:
                if piece.text:
                    yield piece.text
                if piece.last and name is not None:
                    return
        self._check_end(name)

    async def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]:
        """`text_iter` for an event loop."""
        async for piece in self.feed.pieces_async():
            if name is None or piece.name == name:
                if piece.text:
                    yield piece.text
                if piece.last and name is not None:
                    return
        self._check_end(name)

    def close(self) -> None:
        """Ends the program, whether or not it is done. For streams that are not read to their end."""
        self.family.cancel()
        self._join()

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside.

    def add(self, expr: Expr, where: str) -> None:
        self._check_running()
        variables = [Variable(part.name, self.feed) for part in named_parts(expr)]
        with self._named:
            for variable in variables:
                if variable.name is not None:
                    self._variables.setdefault(variable.name, []).append(variable)
            self._named.notify_all()

        async def work() -> None:
            if self.error is not None:
                return
            self._interpreter.where = where
            try:
                await self._interpreter.execute(expr, iter([_Watched(v, self) for v in variables]))
            except ProgramError as error:
                self.stop(error)
            except Exception as error:
                made = ProgramError(f"{type(error).__name__}: {error}", where)
                made.__cause__ = error
                self.stop(made)

        self._do(work, *(variable.value for variable in variables))

    def _do(self, work: Callable[[], Awaitable[None]], *promised: Future[Any]) -> None:
        """Has the line do it; what it promises is kept, or fails with the program."""
        self._open = [future for future in self._open if not future.done()]
        self._open += promised
        self.line.put(work)
        if self.error is not None:
            # It may have failed before it could know of these.
            self.stop(self.error)

    def stop(self, error: ProgramError) -> None:
        """The program has failed: what is not filled will not be."""
        self.error = self.error or error
        for future in list(self._open):
            _settle(future, self.error)
        self.family.first_answer.set()

    async def _inherit(self, parent: Future[Transcript]) -> None:
        try:
            self._interpreter.transcript = (await asyncio.wrap_future(parent)).copy()
        except ProgramError as error:
            self.stop(error)

    def _show_text(self, text: str) -> None:
        self.feed.add(Piece(None, text))

    def end(self) -> None:
        """Nothing more will come of it."""
        self.ended = True
        self.feed.end()
        with self._named:
            self._named.notify_all()

    def _last(self, name: str) -> Variable:
        with self._named:
            if self.runner is not None and self.runner is not threading.current_thread():
                self._named.wait_for(lambda: name in self._variables or self.ended)
            if name in self._variables:
                return self._variables[name][-1]
            known = ", ".join(self._variables) or "none"
        raise self.error or ProgramError(
            f"there is no {name!r} in the program; names so far: {known}", caller()
        )

    def _check_running(self) -> None:
        if self.ended:
            raise self.error or ProgramError("the program has ended; nothing can be added to it", caller())

    def _join(self) -> None:
        if self.runner is not None and self.runner is not threading.current_thread():
            self.runner.join()

    def _check_end(self, name: str | None) -> None:
        self._join()
        if self.error is not None:
            raise self.error
        if name is not None:
            self._last(name)

    def _message(self, role: str, content: Expr | str | None, where: str) -> _Within:
        if content is not None:
            self.add(Message(role, where, as_expr(content)), where)
        return _Within(self, role, where, empty=content is None)


class _Watched:
    """A variable whose answer the state takes note of."""

    def __init__(self, variable: Variable, state: ProgramState) -> None:
        self._variable, self._state = variable, state

    def show(self, piece: str) -> None:
        self._state.family.first_answer.set()
        self._variable.show(piece)

    def fill(self, text: str, meta: Completion | Choice) -> None:
        self._state.family.first_answer.set()
        self._state.metas.append(meta)
        self._variable.fill(text, meta)


class _Within:
    """`with s.user():` begins a message and ends it."""

    def __init__(self, state: ProgramState, role: str, where: str, *, empty: bool) -> None:
        self._state, self._role, self._where, self._empty = state, role, where, empty

    def __enter__(self) -> ProgramState:
        if not self._empty:
            raise ProgramError(
                f"s.{self._role}(…) with a content is a whole message, not for `with`", self._where
            )
        self._state.add(Begin(self._role, self._where), self._where)
        return self._state

    def __exit__(self, *_: object) -> None:
        self._state.add(End(self._role, self._where), self._where)


def _settle(future: Future[Any], error: ProgramError | None) -> None:
    """Ends a promise, unless that has happened, in whichever thread."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except InvalidStateError:
        pass
