"""How a browser stays logged in to the dashboard without keeping the API key.

The page sends the key once, as a bearer token like any client; the server answers with a cookie of random letters that
stands for it, on the dashboard's own paths only. Scripts cannot read it, other sites cannot use it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

from aiohttp import web

COOKIE = "tierax_dashboard"
PATH = "/dashboard"
LIFETIME = 12 * 3600.0
"""Seconds that a login lasts."""
MOST = 1000
"""Logins at a time; the oldest makes room."""


class Sessions:
    """Cookies and the API keys that they stand for. `clock` gives seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By digest: looking one up takes a time that tells nothing of the cookies that there are.
        self._open: dict[bytes, tuple[float, str]] = {}

    def open(self, request: web.Request, response: web.Response, key: str) -> None:
        """Gives the client a cookie that stands for `key`."""
        token = secrets.token_urlsafe(32)
        while len(self._open) >= MOST:
            del self._open[next(iter(self._open))]
        self._open[_digest(token)] = self._clock() + LIFETIME, key
        response.set_cookie(
            COOKIE,
            token,
            path=PATH,
            max_age=int(LIFETIME),
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )

    def key_of(self, request: web.Request) -> str | None:
        """The key that the client's cookie stands for; None without a valid one, and outside the dashboard."""
        token = request.cookies.get(COOKIE)
        inside = request.path == PATH or request.path.startswith(f"{PATH}/")
        if token is None or not inside:
            return None
        until, key = self._open.get(_digest(token), (0.0, ""))
        return key if self._clock() < until else None

    def close(self, request: web.Request, response: web.Response) -> None:
        """Ends the client's login."""
        token = request.cookies.get(COOKIE)
        if token is not None:
            self._open.pop(_digest(token), None)
        response.del_cookie(COOKIE, path=PATH)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
