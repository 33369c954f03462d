"""Reads request bodies within bounds, compressed or not."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from ..core.keys import CONFIG, SERVICE
from .errors import ApiError, bad_request

_STEP = 2**18
"""Bytes decompressed at a time, between which the event loop gets its turn."""
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


_SMALL = 2**16
"""Bytes that are decoded at once; more are worth the way to a worker."""

_T = TypeVar("_T")


async def read_as(request: web.Request, decode: Callable[[bytes], _T]) -> _T:
    """The body as `decode` reads it; a big one in a worker, since it may be made of a million little things.

    Raises what `read_body` and `decode` do.
    """
    body = await read_body(request)
    return decode(body) if len(body) <= _SMALL else await request.app[SERVICE].in_worker(decode, body)


async def read_body(request: web.Request) -> bytes:
    """The whole body, decompressed. `ApiError` 413 as soon as it is known to exceed the server's `max_body_size`, 408
    when it has not come within its `read_timeout`.

    The runner leaves the decompression to this function (see `server.make_runner`): aiohttp's own would go on
    unpacking the rest of a body that was refused, and ends the connection at a damaged one.
    """
    limit = request.app[CONFIG].max_body_size
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
    if request.content.is_eof():
        # It came with its headers, as most do: nothing to wait for.
        return await _read(request, limit)
    seconds = request.app[CONFIG].read_timeout
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, limit)
    except TimeoutError:
        raise ApiError(
            408, f"The body has not come within {seconds:g} seconds.", code="body_timeout"
        ) from None


async def _read(request: web.Request, limit: int) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise _too_large(limit)
        return bytes(body)
    if encoding not in _WINDOW_BITS:
        message = "Content-Encoding must be gzip, deflate or identity."
        raise ApiError(415, message, code="unsupported_encoding")
    try:
        return await _unpack(request, _WINDOW_BITS[encoding], limit)
    except zlib.error:
        raise bad_request(f"The body is not valid {encoding} data.", code="invalid_encoding") from None


async def _unpack(request: web.Request, window_bits: int, limit: int) -> bytes:
    unpacker = zlib.decompressobj(window_bits)
    body = bytearray()
    async for chunk in request.content.iter_any():
        while chunk and not unpacker.eof:
            body += unpacker.decompress(chunk, _STEP)
            chunk = unpacker.unconsumed_tail
            if len(body) > limit:
                raise _too_large(limit)
            await asyncio.sleep(0)
    # What remains once the input has ended is less than a step.
    body += unpacker.flush()
    if not unpacker.eof:
        raise zlib.error("cut off")
    if len(body) > limit:
        raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    message = f"The body is larger than the {limit} bytes that this server accepts."
    return ApiError(413, message, code="request_too_large")
