"""`@function`: a program as a Python function, and the ways to run it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any, overload

from .backend import Backend, default_backend
from .budget import Budget
from .errors import BackendError, ProgramError, caller
from .expr import Sampling
from .family import Family
from .recording import in_function
from .state import ProgramState

THREADS = 64
"""Programs of a batch that run at the same time, unless said otherwise; they mostly wait."""


class Function:
    """A program. `run`, `run_batch` and `stream` execute it; called with a state it adds to that one, as a part of
    another program."""

    def __init__(
        self, body: Callable[..., Any], max_total_tokens: int | None, bound: Mapping[str, Any]
    ) -> None:
        self.__doc__ = body.__doc__
        self.__name__ = getattr(body, "__name__", "program")
        self._body = body
        self._max_total_tokens = max_total_tokens
        self._bound = dict(bound)
        self._parameters = _parameters(body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With a state as the first argument: goes on with that program, and returns what the function returns. Else `run`."""
        if args and isinstance(args[0], ProgramState):
            return self._body(*args, **{**self._bound, **kwargs})
        return self.run(*args, **kwargs)

    def bind(self, **kwargs: Any) -> Function:
        """The same program with some arguments given."""
        if unknown := [name for name in kwargs if name not in self._parameters]:
            raise TypeError(f"{self.__name__} has no parameter {unknown[0]!r}")
        return Function(self._body, self._max_total_tokens, {**self._bound, **kwargs})

    def run(
        self,
        *args: Any,
        backend: Backend | None = None,
        stream: bool = False,
        max_total_tokens: int | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """Runs the program to its end and returns its state; with `stream` at once, while it runs.

        `kwargs` are arguments of the program and, those that it does not have, sampling parameters for all its `gen`s.
        `max_total_tokens` bounds the tokens that the program may add, all branches together. Raises `ProgramError`.
        """
        where = caller()
        arguments, sampling = self._split(kwargs)
        state = self._state(backend, max_total_tokens, sampling, where)
        if stream:
            state.runner = threading.Thread(
                target=self._execute_quietly, args=(state, args, arguments), name="program", daemon=True
            )
            state.runner.start()
        else:
            self._execute(state, args, arguments)
        return state

    def stream(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run(…, stream=True)`, for `with f.stream(…) as s:`: iterate over `s.text_iter()` or `s.text_async_iter()`."""
        return self.run(*args, stream=True, **kwargs)

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Backend | None = None,
        num_threads: int | None = None,
        progress_bar: bool = False,
        max_total_tokens: int | None = None,
        **sampling: Any,
    ) -> list[ProgramState]:
        """Runs the program with each of the arguments (keywords, or a list of positional ones); the states in order.

        An item that fails has `.error` set, and does not end the others. The first runs alone until an answer begins, so
        that the prefix that the others have in common with it is computed once. `max_total_tokens` is for each item.
        `sampling` is for all; `progress_bar` shows one where stderr is a terminal.
        """
        where = caller()
        if isinstance(batch, Mapping) or not all(isinstance(item, Mapping | list | tuple) for item in batch):
            raise TypeError("a batch is a list of keyword arguments: [{'question': …}, …]")
        _, plain = self._split(sampling)
        items: list[tuple[ProgramState, Sequence[Any], dict[str, Any]]] = []
        for item in batch:
            args, kwargs = ((), dict(item)) if isinstance(item, Mapping) else (item, {})
            items.append(
                (self._state(backend, max_total_tokens, plain, where), args, {**self._bound, **kwargs})
            )
        threads = min(num_threads or THREADS, len(items)) or 1
        with (
            ThreadPoolExecutor(threads, thread_name_prefix="program") as pool,
            _bar(len(items), progress_bar) as bar,
        ):
            try:
                self._run_items(pool, items, bar)
            except BaseException:
                for state, _, _ in items:
                    state.family.cancel()
                raise
        return [state for state, _, _ in items]

    def _run_items(
        self,
        pool: ThreadPoolExecutor,
        items: list[tuple[ProgramState, Sequence[Any], dict[str, Any]]],
        bar: Any,
    ) -> None:
        futures: list[Future[None]] = []
        for state, args, kwargs in items:
            futures.append(pool.submit(self._execute_quietly, state, args, kwargs))
            if len(futures) == 1:
                state.family.first_answer.wait()
        for _ in as_completed(futures):
            bar.update()

    def _execute_quietly(self, state: ProgramState, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Leaves what the program fails by in its state."""
        with suppress(Exception):
            self._execute(state, args, kwargs)

    def _execute(self, state: ProgramState, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            with in_function():
                state.ret_value = self._body(state, *args, **kwargs)
            state.family.finish()
        except BaseException as error:
            state.stop(error if isinstance(error, ProgramError) else _wrapped(error))
            state.family.cancel()
            raise

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the program, and sampling parameters. Raises TypeError for what is neither."""
        arguments, sampling = dict(self._bound), {}
        for name, value in kwargs.items():
            if name in self._parameters:
                arguments[name] = value
            else:
                sampling["max_tokens" if name == "max_new_tokens" else name] = value
        try:
            return arguments, Sampling.checked(sampling)
        except TypeError as error:
            raise TypeError(f"{self.__name__}: {error}") from None

    def _state(
        self, backend: Backend | None, max_total_tokens: int | None, sampling: Mapping[str, Any], where: str
    ) -> ProgramState:
        budget = Budget(self._max_total_tokens if max_total_tokens is None else max_total_tokens)
        try:
            return ProgramState(
                Family(default_backend.or_raise(backend, where), Sampling(**sampling), budget)
            )
        except BackendError as error:
            raise ProgramError(str(error), where) from None


@overload
def function(body: Callable[..., Any]) -> Function: ...
@overload
def function(*, max_total_tokens: int | None = None) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    body: Callable[..., Any] | None = None, *, max_total_tokens: int | None = None
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Makes a program out of `def f(s, …)`, whose first parameter is the state to add to.

    `max_total_tokens` bounds the tokens that a run may add, all its branches together.
    """
    Budget(max_total_tokens)
    if body is None:
        return lambda body: Function(body, max_total_tokens, {})
    return Function(body, max_total_tokens, {})


def _parameters(body: Callable[..., Any]) -> set[str]:
    """Names of a program's arguments, but for the state. Raises TypeError if there is no place for that."""
    if inspect.iscoroutinefunction(body):
        raise TypeError(
            "a program is a plain function: def f(s, …), without async; streams serve event loops"
        )
    parameters = list(inspect.signature(body).parameters.values())
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise TypeError("a program takes its state as the first parameter: def f(s, …)")
    return {parameter.name for parameter in parameters[1:]}


def _wrapped(error: BaseException) -> ProgramError:
    """A mistake of the program's own Python code."""
    trace = error.__traceback__
    where = None
    while trace is not None:
        if trace.tb_frame.f_code is not Function._execute.__code__:
            where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    made = ProgramError(f"{type(error).__name__}: {error}", where)
    made.__cause__ = error
    return made


def _bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="program", disable=None if shown else True)
