"""Errors as clients see them: always JSON in the form of the protocol that they speak, never a traceback."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ...engine.chat_template import TemplateError
from ...engine.validate import ParameterError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


CLIENT_LEFT = 499
"""Status under which calls are counted whose client went away; it is never sent."""


class ApiError(Exception):
    """An answer other than success: HTTP `status` and the fields of OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def payload(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def anthropic_payload(error: ApiError) -> dict[str, Any]:
    """An error in the form of Anthropic's API: `{"type": "error", "error": {type, message}}`."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A client's mistake (400), naming the field at fault."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot take this now (503)."""
    return ApiError(503, message, code=code)


def internal_error() -> ApiError:
    """A fault of ours; what it was stands in the log only."""
    return ApiError(500, "The server had an internal error; its log says more.", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """Any exception of a handler as its answer; unexpected ones are logged and become a plain 500."""
    match error:
        case ApiError():
            return error
        case ParameterError():
            return bad_request(str(error), error.param, error.code)
        case TemplateError():
            return bad_request(f"The chat template refused the messages: {error}", "messages")
        case web.HTTPException():
            return ApiError(error.status, error.reason, code=_code(error.reason))
        case web.RequestPayloadError():
            return bad_request(
                "The body could not be read: it is cut off, or not encoded as its headers say."
            )
        case _:
            # Where it happened, without the message, which may quote the prompt.
            places = "".join(traceback.format_tb(error.__traceback__))
            log.error("unexpected %s\n%s", type(error).__name__, places)
            log.debug("its message", exc_info=error)
            return internal_error()


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """`payload` (anything msgspec encodes) as a JSON answer."""
    body = msgspec.json.encode(payload)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception of a handler, and the router's own 404 and 405, into a JSON answer."""
    try:
        return await handler(request)
    except ConnectionError:
        if request.transport is not None:
            # The client is there, but does not read: what is still to be sent would be kept for it for ever.
            request.transport.abort()
        # No error of ours, to be logged as one; nobody gets to read this.
        return web.Response(status=CLIENT_LEFT)
    except Exception as error:
        return _answer(request, error)


def _answer(request: web.Request, error: Exception) -> web.Response:
    # A function of its own: in the frame above, which the traceback has, the error would hold itself.
    answer = as_api_error(error)
    headers: dict[str, str] = {}
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = ",".join(sorted(error.allowed_methods))
        answer.message = f"{request.method} is not allowed on {request.path}."
    elif isinstance(error, web.HTTPNotFound):
        answer.message = f"There is nothing at {request.path}."
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if answer.status in (429, 503):
        headers["Retry-After"] = "1"
    anthropic = request.path == _ANTHROPIC_PATH or request.path.startswith(f"{_ANTHROPIC_PATH}/")
    payload = anthropic_payload(answer) if anthropic else answer.payload()
    return json_response(payload, answer.status, headers)


def _code(reason: str) -> str:
    return reason.lower().replace(" ", "_")
