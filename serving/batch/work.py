"""Many lines at once, within a bound: the loop beneath batches of the server and of the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from itertools import islice
from typing import TypeVar

from .lines import Line

CHUNK = 64
"""Lines read at a time."""

_T = TypeVar("_T")


async def in_chunks(
    lines: Iterator[Line], run: Callable[[Callable[[], list[Line]]], Awaitable[list[Line]]]
) -> AsyncIterator[list[Line]]:
    """The lines, some at a time, read by `run`, which takes the blocking away from the event loop."""
    while chunk := await run(lambda: list(islice(lines, CHUNK))):
        yield chunk


async def answer_all(
    chunks: AsyncIterator[list[Line]],
    done: Container[str | int],
    answer: Callable[[Line], Awaitable[None]],
    slots: asyncio.Semaphore,
) -> None:
    """Answers each line whose key is not in `done` in a task of its own, as many at once as there are slots.

    The first exception of one ends all, and is raised; being cancelled ends all too.
    """

    async def one(line: Line) -> None:
        await answer(line)

    try:
        async with asyncio.TaskGroup() as group:
            async for chunk in chunks:
                for line in chunk:
                    if line.key in done:
                        continue
                    await slots.acquire()
                    # By a callback, since a task that is cancelled before it begins runs nothing of its own.
                    group.create_task(one(line)).add_done_callback(lambda _: slots.release())
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
