"""A file of lines answered without the server's batches: by an engine of this process, or by some server's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import aiohttp
import msgspec

from ...engine.config import EngineConfig
from ...engine.errors import EngineStopped
from ..app import make_app
from ..config import ServerConfig
from ..core.keys import BATCHES
from ..core.service import EngineRunner
from ..http.errors import ApiError
from ..openai.answers import ErrorAnswer
from ..server import make_runner
from .dispatch import Answer, check_whole_answer
from .lines import Line, Problem, answer_line, problem_line
from .work import answer_all, in_chunks

POLL = 0.05
"""Seconds before a busy engine of this process is asked again."""
DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before a busy or silent server is asked again, unless it names a time; after the last one the run ends."""
MAX_DELAY = 60.0
_BUSY = (429, 502, 503, 504)
_TIMEOUT = aiohttp.ClientTimeout(total=3600, sock_connect=10)

Answerer = Callable[[Line], Awaitable[Answer | Problem]]


class ServerGone(Exception):
    """A server cannot be used, now or any more; `reached`: it has answered before."""

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


async def answer_file(
    lines: Iterator[Line],
    done: Container[str | int],
    answer: Answerer,
    put: Callable[[bytes], None],
    *,
    concurrency: int,
) -> None:
    """Answers the lines whose keys are not in `done`; `put` gets each output line as soon as there is one."""

    async def one(line: Line) -> None:
        result = line.problem or await answer(line)
        if isinstance(result, Problem):
            put(problem_line(line, result))
        else:
            put(answer_line(line, result.status, result.body))

    await answer_all(in_chunks(lines, asyncio.to_thread), done, one, asyncio.Semaphore(concurrency))


def engine_thread(config: EngineConfig) -> EngineRunner:
    """An engine that is loaded but not started, for `local_answerer`. Raises `ConfigError` and what else `Engine` does."""
    from ...engine.replicas import load_thread

    return load_thread(config)


@asynccontextmanager
async def local_answerer(thread: EngineRunner, max_body_size: int) -> AsyncIterator[Answerer]:
    """Answers as a server over this engine would. Starts the engine's thread, and closes it in the end.

    The answerer raises `EngineStopped` when the engine has ended.
    """
    app = make_app(thread, ServerConfig(data_dir="none", max_body_size=max_body_size))
    runner = make_runner(app)
    await runner.setup()
    thread.start()
    dispatcher = app[BATCHES].dispatcher

    async def answer(line: Line) -> Answer:
        while True:
            found = await dispatcher.answer(line.url, line.body, "")
            if found.status not in _BUSY:
                return found
            if not thread.alive:
                raise EngineStopped("the engine has stopped; its log says why")
            await asyncio.sleep(POLL)

    try:
        yield answer
    finally:
        await runner.cleanup()
        await asyncio.to_thread(thread.close)


@asynccontextmanager
async def remote_answerer(base_url: str, api_key: str | None) -> AsyncIterator[Answerer]:
    """Asks a server. The answerer raises `ServerGone` when it cannot be reached or refuses the key."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(headers=headers, timeout=_TIMEOUT) as session:
        yield _Remote(session, base_url.rstrip("/").removesuffix("/v1")).answer


class _Remote:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self._reached = False

    async def answer(self, line: Line) -> Answer | Problem:
        if not line.url.startswith("/v1/"):
            return Problem("invalid_url", f"url must begin with /v1/, unlike {line.url[:100]!r}.", "url")
        try:
            check_whole_answer(line.body)
        except ApiError as error:
            return Answer(error.status, msgspec.json.encode(error.payload()))
        for delay in (*DELAYS, None):
            try:
                status, body, wanted = await self._ask(line)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                if delay is None or not self._reached:
                    raise ServerGone(f"{self._url}: {reason}", reached=self._reached) from None
                await asyncio.sleep(delay)
                continue
            self._reached = True
            if status not in _BUSY:
                return _as_answer(status, body)
            if delay is None:
                raise ServerGone(f"{self._url} has no room: {_message(body) or status}", reached=True)
            await asyncio.sleep(min(delay if wanted is None else wanted, MAX_DELAY))
        raise AssertionError("the last try returns or raises")

    async def _ask(self, line: Line) -> tuple[int, bytes, float | None]:
        """Status, body and the seconds that the server wants us to wait."""
        async with self._session.post(self._url + line.url, data=line.body) as response:
            if response.status == HTTPStatus.UNAUTHORIZED:
                raise ServerGone(f"{self._url}: the server wants another API key", reached=False)
            wanted = response.headers.get("Retry-After", "")
            return response.status, await response.read(), float(wanted) if wanted.isdecimal() else None


def _message(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=ErrorAnswer)["error"]["message"]
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _as_answer(status: int, body: bytes) -> Answer | Problem:
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError):
        return Problem("bad_answer", f"The server answered with status {status}, but not with a JSON object.")
    return Answer(status, body)
