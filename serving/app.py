"""The web application: routes, and what lives as long as it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client.exposition import choose_encoder

from ..engine.cache_control import CacheControl
from ..engine.version import __version__
from .auth import auth_middleware, load_keys
from .cache_routes import add_cache_routes
from .chat import chat_completions
from .completions import completions
from .config import ServerConfig
from .errors import ApiError, error_middleware, json_response, unavailable
from .generation import EngineRunner, Service
from .keys import CONFIG, CONTROL, NOW, SERVICE
from .metrics import ServingMetrics

_NOT_LIVE = "The engine's loop shows no sign of life."


def make_app(
    thread: EngineRunner,
    config: ServerConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
) -> web.Application:
    """The application over an engine's thread, which the caller starts and closes. Raises `ConfigError` for a key file
    that cannot be used.

    Run it by `server.make_runner`, whose settings it relies on. `clock` is monotonic, `now` the wall clock; both in seconds.
    """
    control = CacheControl(thread.engine, config.pin_share())
    thread.on_fault = control.restore_pins
    metrics = ServingMetrics(thread.engine, control, clock)
    middlewares: list[Middleware] = [_count_answers, error_middleware]
    if config.locked:
        middlewares.append(auth_middleware(load_keys(config)))
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_size)
    app[SERVICE] = Service(thread, metrics, clock, created=int(now()))
    app[CONFIG] = config
    app[CONTROL] = control
    app[NOW] = now
    app.cleanup_ctx.append(_run_service)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model:.+}", model)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/version", show_version)
    app.router.add_get("/metrics", show_metrics)
    add_cache_routes(app.router)
    return app


async def models(request: web.Request) -> web.Response:
    """The served model, as a list of one."""
    return json_response({"object": "list", "data": [_model_card(request)]})


async def model(request: web.Request) -> web.Response:
    """The served model, by name."""
    request.app[SERVICE].check_model(request.match_info["model"])
    return json_response(_model_card(request))


async def health(request: web.Request) -> web.Response:
    """200 while the engine's loop is alive, else 503; asks nothing of the engine."""
    live = request.app[SERVICE].live
    return json_response({"status": "ok" if live else _NOT_LIVE}, 200 if live else 503)


async def ready(request: web.Request) -> web.Response:
    """200 while new calls are taken; 503 with the reason before warm-up has ended and while shutting down."""
    service = request.app[SERVICE]
    try:
        service.check_ready()
        if not service.live:
            raise unavailable(_NOT_LIVE, "engine_stopped")
    except ApiError as error:
        return json_response({"status": error.message}, error.status)
    return json_response({"status": "ready"})


async def show_version(_: web.Request) -> web.Response:
    """The version of tierax."""
    return json_response({"version": __version__})


async def show_metrics(request: web.Request) -> web.Response:
    """All metrics in the Prometheus or OpenMetrics text format, as the scraper prefers."""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    body = encode(request.app[SERVICE].metrics.registry)
    return web.Response(body=body, headers={"Content-Type": content_type})


def _model_card(request: web.Request) -> dict[str, str | int]:
    engine = request.app[SERVICE].engine
    return {
        "id": engine.model_name,
        "object": "model",
        "created": request.app[SERVICE].created,
        "owned_by": "tierax",
        "max_model_len": engine.context_length,
    }


@web.middleware
async def _count_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "none"
    request.app[SERVICE].metrics.count_answer(route, response.status)
    return response


async def _run_service(app: web.Application) -> AsyncIterator[None]:
    service = app[SERVICE]
    watch = asyncio.create_task(service.watch())
    yield
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    service.close()
