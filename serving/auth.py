"""API keys: every route needs one, whether it exists or not, except the two probes."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from .errors import ApiError

OPEN_ROUTES = frozenset({"/health", "/ready"})


def auth_middleware(api_key: str) -> Middleware:
    """Refuses requests without `Authorization: Bearer <api_key>` before their body is read."""
    expected = api_key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in OPEN_ROUTES:
            return await handler(request)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # The scheme's name is case-insensitive by the HTTP rules, the key is not.
        if scheme.lower() != "bearer" or not given:
            raise ApiError(401, "Send the API key as `Authorization: Bearer KEY`.", code="missing_api_key")
        if not hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), expected):
            raise ApiError(401, "The API key is wrong.", code="invalid_api_key")
        return await handler(request)

    return check
