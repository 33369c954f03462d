"""`/dashboard`: one page that shows what the server does, and the JSON that it reads. For operators only.

The page is one HTML document with its style and script inside, allowed by their digests; it loads nothing from elsewhere.
Who comes without a key gets a page with status 401 that asks for it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ...engine.cache_control import CacheControl
from ...engine.request import Request, Status
from ...engine.version import __version__
from ..core.keys import CONTROL, SERVICE
from ..core.service import Service
from ..http.auth import PRESENTED, check_operator, presented_key
from ..http.errors import ApiError, bad_request, json_response
from ..openapi.document import Documented, Html
from .history import COLUMNS, STEP, History
from .session import PATH, Sessions

MOST_ROWS = 200
"""Requests listed one by one; the rest is counted."""
MOST_NODES = 20_000
"""Nodes of the tree in one picture."""
DEFAULT_NODES = 2_000

_FILES = Path(__file__).parent / "page"
_SCRIPTS = {"dashboard": ("draw.js", "tree.js", "dashboard.js"), "login": ("login.js",)}
"""Page -> its script's parts, in order."""
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TRANSFERS = {
    "save": ("device", "host"),
    "load": ("host", "device"),
    "write": ("host", "disk"),
    "read": ("disk", "host"),
}


@dataclass(frozen=True, slots=True)
class _Document:
    html: str
    policy: str

    def response(self, status: int) -> web.Response:
        headers = _HEADERS | {"Content-Security-Policy": self.policy}
        return web.Response(text=self.html, status=status, headers=headers, content_type="text/html")


HISTORY = web.AppKey("history", History)
SESSIONS = web.AppKey("sessions", Sessions)
DOCUMENTS: web.AppKey[dict[str, _Document]] = web.AppKey("documents")


class DataQuery(msgspec.Struct):
    """Parameters of the dashboard's numbers."""

    since: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class TreeQuery(msgspec.Struct):
    """Parameters of the picture of the tree."""

    nodes: Annotated[int, msgspec.Meta(ge=0, le=MOST_NODES)] = DEFAULT_NODES


def add_dashboard(app: web.Application) -> None:
    """Adds the routes, the history that they show and the logins. `login_middleware` belongs outside that of the keys."""
    service = app[SERVICE]
    app[HISTORY] = History(lambda: service.stats, service.metrics.ttft.take_recent, service.clock)
    app[SESSIONS] = Sessions(service.clock)
    app[DOCUMENTS] = {name: _load(name, scripts) for name, scripts in _SCRIPTS.items()}
    app.cleanup_ctx.append(_keep_history)
    app.router.add_get(PATH, page)
    app.router.add_get(f"{PATH}/data", data)
    app.router.add_get(f"{PATH}/tree", tree)
    app.router.add_post(f"{PATH}/login", login)
    app.router.add_post(f"{PATH}/logout", logout)


@web.middleware
async def login_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Takes a dashboard cookie for the key that it stands for; shows the login page to who has neither."""
    if (key := request.app[SESSIONS].key_of(request)) is not None:
        request[PRESENTED] = key
    try:
        return await handler(request)
    except ApiError as error:
        if request.path != PATH or request.method != "GET" or error.status not in (401, 403):
            raise
        return request.app[DOCUMENTS]["login"].response(error.status)


@Documented(answer=Html, others={401: Html, 403: Html})
async def page(request: web.Request) -> web.Response:
    """The dashboard."""
    check_operator(request)
    return request.app[DOCUMENTS]["dashboard"].response(200)


@Documented(answer=None, status=204)
async def login(request: web.Request) -> web.Response:
    """Exchanges the bearer token of this very request for a cookie. 204."""
    check_operator(request)
    response = web.Response(status=204, headers=_HEADERS)
    if (key := presented_key(request)) is not None:
        request.app[SESSIONS].open(request, response, key)
    return response


@Documented(answer=None, status=204)
async def logout(request: web.Request) -> web.Response:
    """Ends the login. 204."""
    response = web.Response(status=204, headers=_HEADERS)
    request.app[SESSIONS].close(request, response)
    return response


@Documented(query=DataQuery)
async def data(request: web.Request) -> web.Response:
    """All numbers but the tree's; of the history only the points after `?since=`. Asks nothing of the engine's thread."""
    check_operator(request)
    since = _number(request, "since", 0, 2**53)
    service, history = request.app[SERVICE], request.app[HISTORY]
    metrics, engine = service.metrics, service.engine
    hit_rate, busy = metrics.hit_rate(), metrics.busy_ratio()
    stats = service.stats
    return json_response(
        {
            "model": engine.model_name,
            "version": __version__,
            "state": _state(service),
            "logged_in": PRESENTED in request,
            "seconds": round(history.seconds, 2),
            "history": {
                "columns": COLUMNS,
                "step": STEP,
                "number": history.number,
                "points": history.since(since),
            },
            "hit_rate": None if math.isnan(hit_rate) else round(hit_rate, 4),
            "busy": None if math.isnan(busy) else round(busy, 4),
            "totals": {
                "generated": stats.generated_tokens,
                "prompt": stats.prompt_tokens,
                "cached": stats.cached_tokens,
                "finished": stats.finished.copy(),
                "retractions": stats.retractions,
            },
            "page_size": engine.cache.page_size,
            "tiers": _tiers(service, request.app[CONTROL]),
            "transfers": [
                {"from": _TRANSFERS[kind][0], "to": _TRANSFERS[kind][1], **counts}
                for kind, counts in request.app[CONTROL].copies().items()
            ],
            "requests": _requests(service),
        },
        headers=_HEADERS,
    )


@Documented(query=TreeQuery)
async def tree(request: web.Request) -> web.Response:
    """A picture of the radix tree, taken between two steps, in at most `?nodes=` nodes."""
    check_operator(request)
    limit = _number(request, "nodes", DEFAULT_NODES, MOST_NODES)
    control = request.app[CONTROL]
    found = await request.app[SERVICE].in_engine(lambda: control.picture(limit))
    return json_response(found | {"page_size": request.app[SERVICE].engine.cache.page_size}, headers=_HEADERS)


def _state(service: Service) -> str:
    try:
        service.check_ready()
    except ApiError as error:
        return error.message
    return "ready" if service.live else "The engine's loop shows no sign of life."


def _tiers(service: Service, control: CacheControl) -> list[dict[str, Any]]:
    stats, evictions = service.stats, control.evictions()
    return [
        {
            "name": name,
            **asdict(level),
            "hit_tokens": stats.cached_by_tier[name],
            "query_tokens": stats.queries_by_tier[name],
            "evicted_pages": sum(count for (tier, _), count in evictions.items() if tier == name),
        }
        for name, level in control.levels().items()
    ]


def _requests(service: Service) -> dict[str, Any]:
    """Running requests first, then waiting ones, each in the order of arrival; how many there are beyond those listed."""
    found = [request for request in service.open_requests() if request.status is not Status.FINISHED]
    found.sort(key=lambda request: (request.status is Status.WAITING, request.arrival))
    now = service.clock()
    return {
        "rows": [_row(request, now) for request in found[:MOST_ROWS]],
        "hidden": max(0, len(found) - MOST_ROWS),
    }


def _row(request: Request, now: float) -> dict[str, Any]:
    arrived = request.arrival
    return {
        "id": request.id,
        "status": request.status.value,
        "prompt": request.num_prompt,
        "cached": request.cached_by_tier,
        "computed": min(request.num_computed, request.num_prompt),
        "output": request.num_output,
        "most": request.max_total - request.num_prompt,
        "seconds": round(max(0.0, now - arrived), 2) if arrived else 0.0,
        "ttft": round(request.first_token - arrived, 4) if request.first_token is not None else None,
        "priority": request.priority,
    }


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    # Digits only: int() takes signs, spaces and underscores too, and minds very long ones.
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= most):
        raise bad_request(f"{name} must be a number from 0 to {most}.", name)
    return int(text)


def _load(name: str, scripts: Sequence[str]) -> _Document:
    """A page with its style and scripts put in, and the policy that allows these and nothing else."""
    style, script = _read("style.css"), "\n".join(_read(script) for script in scripts)
    policy = [
        "default-src 'none'",
        f"style-src {_digest(style)}",
        f"script-src {_digest(script)}",
        "connect-src 'self'",
        "img-src data:",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
    html = _read(f"{name}.html").replace("/*style*/", style).replace("/*script*/", script)
    return _Document(html, "; ".join(policy))


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


async def _keep_history(app: web.Application) -> AsyncIterator[None]:
    history = app[HISTORY]

    async def sample() -> None:
        while True:
            history.sample()
            await asyncio.sleep(STEP)

    task = asyncio.create_task(sample())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
