"""What every answer carries beside its body: the request's id, and what browsers of other origins need to read it."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence

from aiohttp import hdrs, web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.typedefs import Handler, Middleware

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id")
ID_HEADER = "x-request-id"
ANY_ORIGIN = "*"

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PREFLIGHT_SECONDS = 600


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id: the client's own if it is fit for a log, else a new one."""
    given = request.headers.get(ID_HEADER, "")
    request[REQUEST_ID] = given if _ID.fullmatch(given) else secrets.token_hex(16)
    return await handler(request)


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """An `on_response_prepare` signal: the headers of every answer, streams and errors included."""
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    # Versions of what runs here are nobody's business.
    response.headers[hdrs.SERVER] = "tierax"
    if (request_id := request.get(REQUEST_ID)) is not None:
        response.headers[ID_HEADER] = request_id


class CrossOrigin:
    """Lets pages of the named origins (`*` = all) call the server; without it browsers keep them out."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def middleware(self) -> Middleware:
        """Answers a browser's question whether it may call at all, which comes without a key."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
            if request.method != hdrs.METH_OPTIONS or asked is None or self._allowed(request) is None:
                return await handler(request)
            headers = {
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(
                    hdrs.ACCESS_CONTROL_REQUEST_HEADERS, hdrs.AUTHORIZATION
                ),
                hdrs.ACCESS_CONTROL_MAX_AGE: str(_PREFLIGHT_SECONDS),
            }
            return web.Response(status=204, headers=headers)

        return answer

    async def set_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """An `on_response_prepare` signal."""
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if (origin := self._allowed(request)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = f"{ID_HEADER}, {hdrs.RETRY_AFTER}"

    def _allowed(self, request: web.Request) -> str | None:
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and ANY_ORIGIN in self._origins:
            return ANY_ORIGIN
        return origin if origin in self._origins else None


_POLLED = ("/dashboard/data", "/dashboard/tree")
"""Routes that an open page asks every second: their good answers are worth a line to who debugs only."""


class AccessLog(AbstractAccessLogger):
    """A line per answer, without anything that the client wrote but the request's id: paths may hold secrets."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        route, request_id = "-", "-"
        if isinstance(request, web.Request):
            request_id = request.get(REQUEST_ID, "-")
            # What was no HTTP (a probe by another protocol, say) has met no route, and even asking for one fails then.
            if REQUEST_ID in request:
                resource = request.match_info.route.resource
                route = resource.canonical if resource is not None else "-"
        method = request.method if request.method in hdrs.METH_ALL else "-"
        quiet = route in _POLLED and response.status == 200
        self.logger.log(
            logging.DEBUG if quiet else logging.INFO,
            '%s "%s %s" %d, %d bytes, %.3f s, id %s',
            request.remote,
            method,
            route,
            response.status,
            response.body_length,
            time,
            request_id,
        )
