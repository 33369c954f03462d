"""OpenTelemetry: a span per generation, sent by OTLP over HTTP, under the gen_ai names. Never any text.

The packages for it are optional: `pip install tierax[otlp]`. A `traceparent` header makes the span a child of the
client's. Further headers for the collector come from OTEL_EXPORTER_OTLP_HEADERS, as everywhere.
"""

# The packages are optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from ...engine.config import ConfigError
from ...engine.version import __version__
from ..core.generation import Generation
from ..core.keys import SERVICE

_OPERATIONS = {"chatcmpl": "chat", "resp": "chat", "msg": "chat", "embd": "embeddings"}
"""First part of a call's id -> gen_ai.operation.name; all else completes text."""


PATIENCE = 2.0
"""Seconds, tries included, that a collector gets to take spans; at the end of the server it is waited for so long."""


def check_packages() -> None:
    """Raises `ConfigError` when the packages are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError:
        message = "otlp_endpoint: this needs OpenTelemetry's packages: pip install 'tierax[otlp]'"
        raise ConfigError(message) from None


class Tracer:
    """Makes and sends spans. `now` is the wall clock, `clock` that of the service, both in seconds."""

    def __init__(self, endpoint: str, now: Callable[[], float], clock: Callable[[], float]) -> None:
        """Raises `ConfigError` when the packages are not installed."""
        check_packages()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create({"service.name": "tierax", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=PATIENCE))
        )
        self._tracer = self._provider.get_tracer("tierax", __version__)
        self._now, self._clock = now, clock

    def record(self, generation: Generation, model: str) -> None:
        """Makes the span of a generation that has just ended, in the context of the request that asked for it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if generation.call.warming:
            return
        end = self._now()
        started = end - (self._clock() - generation.call.started)
        attributes = _attributes(generation, model)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {model}",
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=round(started * 1e9),
        )
        if (failure := generation.failure) is not None:
            span.set_attribute("error.type", failure.code or str(failure.status))
            span.set_status(Status(StatusCode.ERROR, failure.code))
        span.end(round(end * 1e9))

    def close(self) -> None:
        """Sends what is left, and ends the sender's thread."""
        self._provider.shutdown()


def add_tracing(app: web.Application, endpoint: str, now: Callable[[], float]) -> None:
    """Has every generation of the application traced. Raises `ConfigError`."""
    service = app[SERVICE]
    tracer = Tracer(endpoint, now, service.clock)
    service.on_end = lambda generation: tracer.record(generation, service.engine.model_name)
    app.middlewares.append(_use_client_context)

    async def own(_: web.Application) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(tracer.close)

    app.cleanup_ctx.append(own)


@web.middleware
async def _use_client_context(request: web.Request, handler: Handler) -> web.StreamResponse:
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # A request's handler is a task with a context of its own: nothing to take back.
    context.attach(TraceContextTextMapPropagator().extract(dict(request.headers)))
    return await handler(request)


def _attributes(generation: Generation, model: str) -> dict[str, Any]:
    call, usage = generation.call, generation.usage()
    params, cached = call.params, usage["prompt_tokens_details"]
    attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(call.prefix, "text_completion"),
        "gen_ai.provider.name": "tierax",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": generation.id,
        "gen_ai.request.choice.count": generation.num_choices,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": cached["cached_tokens"],
        # Left by its client, a request has no reason yet.
        "gen_ai.response.finish_reasons": [
            request.finish_reason or "abort" for request in generation.requests
        ],
    }
    for tier, tokens in cached["cached_tokens_by_tier"].items():
        attributes[f"tierax.cached_tokens.{tier}"] = tokens
    firsts = [request.first_token for request in generation.requests if request.first_token is not None]
    if firsts:
        attributes["tierax.time_to_first_token"] = max(0.0, min(firsts) - call.started)
    return attributes
