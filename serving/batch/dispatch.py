"""Answers a line of a batch by the very handler that answers the same call over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import msgspec
from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from ..http.auth import act_for
from ..http.errors import ApiError, bad_request, error_middleware

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
"""Where a batch may go, as far as the application has it."""
PRIORITY = 2**20
"""Of every line of a batch: behind whatever live calls ask for."""
_ROOM = 2**31
"""Bytes of a body that the reader takes before it would ask its connection to pause, which is not there."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What HTTP would have answered: a status and a JSON body."""

    status: int
    body: bytes


class Dispatcher:
    """The application's own table of routes, for calls that come from within."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._routes = {
            route.resource.canonical: route
            for route in app.router.routes()
            if route.method == "POST" and route.resource is not None and route.resource.canonical in ENDPOINTS
        }

    @property
    def endpoints(self) -> list[str]:
        """The paths that can be called."""
        return [path for path in ENDPOINTS if path in self._routes]

    async def answer(self, url: str, body: bytes, tenant: str) -> Answer:
        """Calls a handler with a JSON object, in the name of a tenant. Every failure is an answer, as over HTTP."""
        route = self._routes.get(url)
        if route is None:
            message = f"There is nothing at {url[:100]!r} for a batch; there are {', '.join(self.endpoints)}."
            error = ApiError(404, message, param="url", code="not_found")
            return Answer(error.status, msgspec.json.encode(error.payload()))

        async def handle(request: web.Request) -> web.StreamResponse:
            check_whole_answer(body)
            return await route.handler(request)

        request = _LineRequest(self._app, route, url, body)
        act_for(request, tenant, PRIORITY)
        response = await error_middleware(request, handle)
        assert isinstance(response, web.Response)
        return Answer(response.status, cast(bytes, response.body))


class _Streamed(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"null")


def check_whole_answer(body: bytes) -> None:
    """Raises `ApiError` 400 where a JSON object asks for a stream, which no line of a file can hold."""
    if bytes(msgspec.json.decode(body, type=_Streamed).stream) not in (b"null", b"false"):
        raise bad_request("stream is not supported in a batch.", "stream", "unsupported_parameter")


class _LineRequest(web.Request):
    """A request that came by no connection."""

    def __init__(self, app: web.Application, route: web.AbstractRoute, url: str, body: bytes) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        connection = web.Server(_never)()
        payload = StreamReader(connection, _ROOM, loop=loop)
        payload.feed_data(body)
        payload.feed_eof()
        headers = CIMultiDictProxy(CIMultiDict({"Content-Type": "application/json"}))
        message = RawRequestMessage(
            "POST", url, HttpVersion11, headers, (), False, None, False, False, URL(url)
        )
        nowhere: Any = None
        super().__init__(message, payload, connection, nowhere, task, loop)
        self._match_info = web.UrlMappingMatchInfo({}, route)
        self._match_info.add_app(app)


async def _never(_: web.BaseRequest) -> NoReturn:
    raise AssertionError("nothing arrives by this connection")
