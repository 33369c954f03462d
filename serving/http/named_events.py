"""Answers whose stream consists of events with names, as OpenAI's Responses and Anthropic's Messages have them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..core.generation import Event, Generation
from .errors import ApiError, as_api_error, json_response
from .streaming import HEADERS, send

Told = dict[str, Any]
"""An event's data; its `type` is the event's name too."""


class EventForm(Protocol):
    """A protocol's shape of an answer, built up from events; what a stream tells and `answer` come from the same state."""

    def begin(self) -> Iterator[Told]:
        """What can be told before anything is generated."""
        ...

    def add(self, event: Event) -> Iterator[Told]:
        """What an event adds."""
        ...

    def end(self) -> Iterator[Told]:
        """What ends the stream, once all events are there."""
        ...

    def fail(self, error: ApiError) -> Iterator[Told]:
        """What ends the stream when the call fails."""
        ...

    def answer(self) -> dict[str, Any]:
        """The whole answer, once all events are there."""
        ...


async def respond(
    request: web.Request,
    generation: Generation,
    form: EventForm,
    *,
    stream: bool,
    done: Callable[[], None] = lambda: None,
) -> web.StreamResponse:
    """Answers with one object, or streams the events as they come. `done` is called once all of them are there, before
    the client learns of it.

    Raises `ApiError` when a call that is not streamed fails; a stream tells of it, since its status is long sent.
    """
    if stream:
        return await _stream(request, generation, form, done)
    async for events in generation.batches():
        for event in events:
            for _ in form.add(event):
                pass
    done()
    return json_response(form.answer())


async def _stream(
    request: web.Request, generation: Generation, form: EventForm, done: Callable[[], None]
) -> web.StreamResponse:
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    await _send(request, response, form.begin())
    try:
        async for events in generation.batches():
            await _send(request, response, (told for event in events for told in form.add(event)))
        done()
        await _send(request, response, form.end())
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        await _send(request, response, form.fail(as_api_error(error)))
    await response.write_eof()
    return response


async def _send(request: web.Request, response: web.StreamResponse, events: Iterator[Told]) -> None:
    lines = b"".join(
        b"event: %b\ndata: %b\n\n" % (told["type"].encode(), msgspec.json.encode(told)) for told in events
    )
    if lines:
        await send(request, response, lines)
