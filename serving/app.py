"""The web application: routes, and what lives as long as it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client.exposition import choose_encoder

from ..engine.errors import EngineStopped
from ..engine.version import __version__
from .batch.routes import add_batches
from .config import ServerConfig
from .core.keys import CONFIG, CONTROL, NOW, RESPONSES, SERVICE
from .core.service import EngineRunner, Service
from .dashboard.routes import add_dashboard, login_middleware
from .events.attach import add_kv_events
from .http.auth import auth_middleware, load_keys
from .http.errors import ApiError, error_middleware, json_response, unavailable
from .http.headers import CrossOrigin, identify, set_headers
from .http.limits import SHARES, Shares, limit_middleware
from .messages.routes import add_message_routes
from .native.cache import add_cache_routes
from .native.routes import EMBEDDINGS, add_native_routes
from .observe.metrics import ServingMetrics
from .observe.tracing import add_tracing
from .openai.answers import ModelCard, ModelList, Status, Version
from .openai.chat import chat_completions
from .openai.completions import completions
from .openai.embeddings import embeddings
from .openapi.document import Documented, openapi
from .parsers.choose import output_style
from .responses.routes import add_response_routes
from .responses.store import ResponseStore

ENGINE_PATIENCE = 10.0
"""Seconds in which the engine's thread has to come round to answer `/health_generate`."""
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
    control = thread.cache_control(config.pin_share())
    metrics = ServingMetrics(thread, control, clock, config.metrics_alias)
    cross_origin = CrossOrigin(config.cors_origins)
    middlewares: list[Middleware] = [identify, _count_answers, error_middleware]
    if config.cors_origins:
        middlewares.append(cross_origin.middleware())
    if keys := load_keys(config):
        middlewares += [login_middleware, auth_middleware(keys, locked=config.locked)]
    middlewares.append(limit_middleware)
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_size)
    template = thread.engine.chat_template
    style = output_style(
        template.source if template else "",
        reasoning_parser=config.reasoning_parser,
        tool_call_parser=config.tool_call_parser,
    )
    app[SERVICE] = Service(
        thread,
        metrics,
        clock,
        created=int(now()),
        output_style=style,
        max_queued=config.max_queued_requests,
        request_timeout=config.request_timeout,
    )
    app[CONFIG] = config
    app[SHARES] = Shares()
    app[CONTROL] = control
    app[NOW] = now
    app[RESPONSES] = ResponseStore()
    app.cleanup_ctx.append(_run_service)
    app.on_response_prepare.append(set_headers)
    if config.cors_origins:
        app.on_response_prepare.append(cross_origin.set_headers)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model:.+}", model)
    app.router.add_get("/health", health)
    app.router.add_get("/health_generate", health_generate)
    app.router.add_get("/ready", ready)
    app.router.add_get("/version", show_version)
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/metrics", show_metrics)
    app.router.add_post("/v1/embeddings", embeddings)
    add_native_routes(app.router)
    add_response_routes(app.router)
    add_message_routes(app.router)
    add_cache_routes(app.router)
    add_dashboard(app)
    if config.otlp_endpoint is not None:
        add_tracing(app, config.otlp_endpoint, now)
    if (events := config.kv_events_config()) is not None:
        add_kv_events(app, thread, events, now)
    add_batches(app, thread.engine.model_name)
    return app


@Documented(answer=ModelList)
async def models(request: web.Request) -> web.Response:
    """The served model, as a list of one."""
    return json_response({"object": "list", "data": [_model_card(request)]})


@Documented(answer=ModelCard)
async def model(request: web.Request) -> web.Response:
    """The served model, by name."""
    request.app[SERVICE].check_model(request.match_info["model"])
    return json_response(_model_card(request))


@Documented(answer=Status, others={503: Status})
async def health(request: web.Request) -> web.Response:
    """200 while the engine's loop is alive, else 503; asks nothing of the engine."""
    live = request.app[SERVICE].live
    return json_response({"status": "ok" if live else _NOT_LIVE}, 200 if live else 503)


@Documented(answer=Status, others={503: Status})
async def health_generate(request: web.Request) -> web.Response:
    """200 once the engine's thread has come round to answer, between two steps; 503 if it does not within 10 seconds.

    Before warm-up has ended it does not.
    """
    service = request.app[SERVICE]
    answered = asyncio.wrap_future(service.thread.call(lambda: None))
    try:
        await asyncio.wait_for(answered, ENGINE_PATIENCE)
    except (TimeoutError, EngineStopped):
        return json_response({"status": _NOT_LIVE}, 503)
    return json_response({"status": "ok"})


@Documented(answer=Status, others={503: Status})
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


@Documented(answer=Version)
async def show_version(_: web.Request) -> web.Response:
    """The version of tierax."""
    return json_response({"version": __version__})


@Documented(answer=str)
async def show_metrics(request: web.Request) -> web.Response:
    """All metrics in the Prometheus or OpenMetrics text format, as the scraper prefers."""
    # Colons, which the names of other engines have, come through unharmed in the plain format only.
    plain = request.app[CONFIG].metrics_alias is not None
    encode, content_type = choose_encoder("" if plain else request.headers.get("Accept", ""))
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
        "embeddings": EMBEDDINGS,
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
    tasks = [asyncio.create_task(work) for work in (service.watch(), service.measure_lag())]
    yield
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    service.close()
