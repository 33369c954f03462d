"""What carries out programs: a model behind a URL or in this process, and the event loop that programs run in."""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .errors import BackendError, ProgramError, caller

if TYPE_CHECKING:
    from .expr import Sampling, Shape
    from .result import Result

T = TypeVar("T")

_BREAK = "\n"


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, and how it came about."""

    text: str
    token_ids: list[int]
    """Without the end token."""
    finish_reason: str
    """`stop`, `length`, `abort` or `error`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """The end token included."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed for it."""
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    ttft: float | None = None
    """Seconds to the first token."""
    logprobs: list[float] | None = None
    """Of `token_ids`, if they were asked for."""
    cut_by_stop: bool = False
    """It ended by a stop string, which the tokens hold and the text does not."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of the last tokens of some prompts."""

    logprobs: list[list[float]]
    prompt_tokens: int
    cached_tokens: int


class LoopThread:
    """An event loop in a thread of its own, which starts with the first use and is joined by `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.last: Callable[[], Coroutine[Any, Any, None]] | None = None
        """What is to run at the end, when everything else has been cancelled."""

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` in the loop. Raises `BackendError` after `close`."""
        with self._lock:
            if self._closed:
                work.close()
                raise BackendError("the backend is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="lang", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Callable[..., object], *args: object) -> None:
        """Calls `work` in the loop soon; does nothing after `close`."""
        with self._lock:
            if self._loop is not None and not self._closed:
                self._loop.call_soon_threadsafe(work, *args)

    def close(self) -> None:
        """Cancels what runs, lets `last` run, and joins the thread. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._loop is None or self._thread is None:
            if self.last is not None:
                asyncio.run(self.last())
            return
        if threading.current_thread() is self._thread:
            # Collected as garbage in the loop itself.
            self._loop.call_soon(self._loop.stop)
            return
        asyncio.run_coroutine_threadsafe(_wind_up(self.last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _wind_up(last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if last is not None:
        await last()


class Backend(ABC):
    """A model that programs run on. A backend of your own implements `encode`, `render`, `complete` and `score`, which are
    called in the backend's event loop, many at a time, and raise `BackendError`."""

    def __init__(self) -> None:
        self.loop = LoopThread()
        self._frames: dict[tuple[str, ...], str] = {}
        self._adds_space: bool | None = None
        # Also at exit: programs need not close a backend.
        self._finalizer = weakref.finalize(self, LoopThread.close, self.loop)

    @abstractmethod
    async def encode(self, text: str, *, begins: bool) -> list[int]:
        """Token ids of a text; `begins`: of a prompt that is not made by the chat template, so that the model may want a
        begin-of-text token."""

    @abstractmethod
    async def render(self, messages: Sequence[Mapping[str, str]], *, answer: bool) -> str:
        """The chat template's text of some messages; `answer`: up to where the model's next one begins."""

    @abstractmethod
    async def complete(
        self, ids: list[int], sampling: Sampling, shape: Shape | None, on_text: Callable[[str], None]
    ) -> Completion:
        """Goes on from some tokens; `on_text` gets the text in pieces. Cancelled, it stops the model."""

    @abstractmethod
    async def score(self, prompts: list[list[int]], start: int) -> Scores:
        """Log-probs of the tokens from index `start` (at least 1) on, of prompts that are the same up to there."""

    def run(self, *, max_total_tokens: int | None = None, **sampling: Any) -> Result:
        """Executes what this thread has recorded since its last run, and returns the texts by name.

        `sampling` and `max_total_tokens` are as for `Function.run`. Raises `ProgramError` if nothing was recorded, if
        another backend is the default, and when the program fails.
        """
        from .recorded import run_recorded

        return run_recorded(self, caller(), max_total_tokens, sampling)

    def close(self) -> None:
        """Ends what still runs and lets go of connections, threads and models. Closing again does nothing."""
        self._finalizer.detach()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def frame(self, roles: tuple[str, ...]) -> str:
        """What the chat template writes between the content of the message before and that of the last of `roles`, which
        begins now. Raises `BackendError` where the template does not let the contents be seen."""
        if roles not in self._frames:
            self._frames[roles] = await self._find_frame(roles)
        return self._frames[roles]

    async def encode_behind(self, text: str, *, begins: bool) -> list[int]:
        """Token ids of a text behind others, or, with `begins`, of a prompt.

        Some tokenizers put a space before whatever they are given. Behind other tokens it does not belong there, so it is left
        to a line break that is dropped again.
        """
        if begins or not await self._finds_space():
            return await self.encode(text, begins=begins)
        head = await self.encode(_BREAK, begins=False)
        whole = await self.encode(_BREAK + text, begins=False)
        same = whole[: len(head)] == head
        return whole[len(head) :] if same else await self.encode(text, begins=False)

    async def _finds_space(self) -> bool:
        if self._adds_space is None:
            alone, behind = (
                await self.encode("a", begins=False),
                await self.encode(_BREAK + "a", begins=False),
            )
            self._adds_space = behind[-len(alone) :] != alone
        return self._adds_space

    async def _find_frame(self, roles: tuple[str, ...]) -> str:
        # The assistant's message begins as the model is used to begin its own, which may be more than a role's header.
        answer = roles[-1] == "assistant" and len(roles) > 1
        messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        text = await self.render(messages[:-1] if answer else messages, answer=answer)
        for i in range(len(messages) - answer):
            if text.count(_mark(i)) != 1:
                raise BackendError(f"the model's chat template hides the content of the {roles[i]} message")
        _, _, after = text.rpartition(_mark(len(roles) - 2)) if len(roles) > 1 else ("", "", text)
        return after if answer else after.partition(_mark(len(roles) - 1))[0]


def _mark(index: int) -> str:
    """Stands for the content of a message, to see what a template writes around it."""
    return f"[[content {index}]]"


class DefaultBackend:
    """Which backend programs run on that name none."""

    def __init__(self) -> None:
        self._backend: Backend | None = None

    def set(self, backend: Backend | None) -> None:
        self._backend = backend

    @property
    def current(self) -> Backend | None:
        return self._backend

    def or_raise(self, given: Backend | None, where: str) -> Backend:
        """The given one, or the default. Raises `ProgramError` if there is neither."""
        backend = given or self._backend
        if backend is None:
            raise ProgramError(
                "there is no backend: give backend=…, or call set_default_backend first", where
            )
        return backend


default_backend = DefaultBackend()


def set_default_backend(backend: Backend | None) -> None:
    """Programs that name no backend run on this one from now on, in every thread; None: on none."""
    if backend is not None and not isinstance(backend, Backend):
        raise TypeError(f"a backend is a Runtime(url) or an Engine(model), not {type(backend).__name__}")
    default_backend.set(backend)
