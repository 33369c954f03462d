"""How a generation leaves the server: one JSON answer, or server-sent events. The same for every protocol."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..core.generation import Choice, Event, Generation
from ..core.keys import CONFIG
from ..openai.bodies import StreamOptions
from .errors import as_api_error, json_response

log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_NO_WAIT = 2**14
"""Bytes that a client may owe before a write can have to wait; asyncio's transports take 64 KiB."""
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Asks buffering proxies to pass events on at once.
    "X-Accel-Buffering": "no",
}


class Form(Protocol):
    """A protocol's shape of an answer. What it says of an event does not depend on how events are batched."""

    def answer(self, generation: Generation, choices: list[Choice]) -> dict[str, Any]:
        """The whole answer, usage included."""
        ...

    def chunk(self, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream around `choices`, without usage."""
        ...

    def choices(self, generation: Generation, event: Event) -> list[dict[str, Any]]:
        """The streamed choices that tell of an event, each for a chunk of its own; none if nothing shows."""
        ...


async def respond_whole(generation: Generation, form: Form) -> web.Response:
    """Waits for every choice and answers with one JSON object. Raises `ApiError` when the call fails."""
    choices = [Choice(index) for index in range(generation.num_choices)]
    async for events in generation.batches():
        for event in events:
            choices[event.index].add(event)
    return json_response(form.answer(generation, choices))


async def respond_stream(
    request: web.Request, generation: Generation, form: Form, options: StreamOptions | None
) -> web.StreamResponse:
    """Streams the events as they come, then usage if asked for, then `[DONE]`.

    A failure in mid-stream is an event with an error object before `[DONE]`: the status is long sent.
    """
    include_usage = options is not None and bool(options.include_usage)
    continuous = include_usage and bool(options and options.continuous_usage_stats)
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    try:
        async for events in generation.batches():
            lines = bytearray()
            for event in events:
                for choice in form.choices(generation, event):
                    chunk = form.chunk(generation, [choice])
                    if include_usage:
                        chunk["usage"] = generation.usage() if continuous else None
                    lines += _line(chunk)
            if lines:
                await send(request, response, bytes(lines))
        if include_usage:
            await send(request, response, _line(form.chunk(generation, []) | {"usage": generation.usage()}))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        await send(request, response, _line(as_api_error(error).payload()))
    await send(request, response, _DONE)
    await response.write_eof()
    return response


async def send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Writes a part of a stream, and waits until the client has read enough of the parts before.

    Raises `ConnectionError` when the client has gone, or lets the server's `write_timeout` pass.
    """
    unread = 0 if request.transport is None else request.transport.get_write_buffer_size()
    if unread + len(data) <= _NO_WAIT:
        # A timer for each token of each stream would be a tenth of the event loop's work.
        await response.write(data)
        return
    try:
        async with asyncio.timeout(request.app[CONFIG].write_timeout):
            await response.write(data)
    except TimeoutError:
        raise ConnectionAbortedError("the client does not read its stream") from None


def _line(payload: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
