"""Reads request bodies within bounds, compressed or not."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from .errors import ApiError, bad_request

_STEP = 2**18
"""Bytes decompressed at a time, between which the event loop gets its turn."""
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: web.Request, limit: int) -> bytes:
    """The whole body, decompressed. `ApiError` 413 as soon as it is known to exceed `limit` bytes.

    The runner leaves the decompression to this function (see `server.make_runner`): aiohttp's own would go on
    unpacking the rest of a body that was refused, and ends the connection at a damaged one.
    """
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
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
