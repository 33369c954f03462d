"""Bounds on what is in progress: of the whole server, and of each API key."""

from __future__ import annotations

from collections import Counter

from aiohttp import web
from aiohttp.typedefs import Handler

from ..core.keys import SERVICE
from .auth import ApiKey, key_of
from .errors import ApiError

FREE_ROUTES = frozenset(
    {
        "/flush_cache",
        "/cache/clear",
        "/cache/unpin",
        "/abort_request",
        "/v1/responses/{response_id}/cancel",
    }
)
"""What makes room rather than taking it; so do the dashboard's own routes."""


class Shares:
    """Calls in progress by API key."""

    def __init__(self) -> None:
        self._open: Counter[ApiKey] = Counter()

    def take(self, key: ApiKey) -> None:
        """Counts one more. Raises `ApiError` 429 when that is more than the key may have."""
        if key.max_concurrency is not None and self._open[key] >= key.max_concurrency:
            message = (
                f"This API key has {key.max_concurrency} calls in progress, which is all that it may have."
            )
            raise ApiError(429, message, code="concurrency_limit")
        self._open[key] += 1

    def give_back(self, key: ApiKey) -> None:
        """Counts one less."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


SHARES = web.AppKey("shares", Shares)


@web.middleware
async def limit_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses calls above the bounds before their bodies are read: 429 for a key's own share, 503 for the server's."""
    if request.method != "POST" or _is_free(request):
        return await handler(request)
    service, shares, key = request.app[SERVICE], request.app[SHARES], key_of(request)
    if key is not None:
        shares.take(key)
    try:
        with service.call_in_progress():
            return await handler(request)
    finally:
        if key is not None:
            shares.give_back(key)


def _is_free(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return (
        resource is None or resource.canonical in FREE_ROUTES or resource.canonical.startswith("/dashboard/")
    )
