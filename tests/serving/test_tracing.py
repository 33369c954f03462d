"""OpenTelemetry spans, as a collector gets them."""

# The packages are optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from helpers.fake_engine import babble, say
from helpers.live_server import eventually
from tierax.engine.config import ConfigError, EngineConfig
from tierax.serving.config import ServerConfig
from tierax.serving.observe.tracing import Tracer
from tierax.serving.server import run

pytestmark = pytest.mark.asyncio


class Collector:
    """An OTLP receiver: its URL, and the spans that came, as attributes with `name`, `trace` and `parent`."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[dict[str, Any]] = []

    async def take(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

        message = service.ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [self._read(span) for span in scope.spans]
        return web.Response(body=service.ExportTraceServiceResponse().SerializeToString())

    def _read(self, span: Any) -> dict[str, Any]:
        def value(any_value: Any) -> Any:
            kind = any_value.WhichOneof("value")
            found = getattr(any_value, kind)
            return [value(item) for item in found.values] if kind == "array_value" else found

        return {
            "name": span.name,
            "trace": span.trace_id.hex(),
            "parent": span.parent_span_id.hex(),
            "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            "status": span.status.code,
            **{pair.key: value(pair.value) for pair in span.attributes},
        }


@pytest_asyncio.fixture
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    found.url = f"http://{host}:{port}"
    yield found
    await runner.cleanup()


async def test_a_generation_is_a_span(serve, collector):
    live = await serve(say("Hello"), otlp_endpoint=collector.url)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    body = {"messages": [{"role": "user", "content": "my secret"}], "temperature": 0.5, "max_tokens": 9}
    status, answer = await live.post("/v1/chat/completions", body, headers=headers)
    assert status == 200
    await live.complete("a prompt")
    assert (await live.post("/v1/completions", {"prompt": "x", "max_tokens": -1}))[0] == 400
    await live.stop()
    chat, completion = collector.spans
    assert chat["name"] == "chat fake"
    assert (chat["trace"], chat["parent"]) == (trace, parent)
    assert chat["gen_ai.operation.name"] == "chat"
    assert chat["gen_ai.provider.name"] == "tierax"
    assert chat["gen_ai.response.id"] == answer["id"]
    assert chat["gen_ai.request.temperature"] == 0.5
    assert chat["gen_ai.request.max_tokens"] == 9
    assert chat["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert chat["gen_ai.usage.output_tokens"] == 6
    assert chat["gen_ai.usage.cache_read.input_tokens"] == 0
    assert chat["gen_ai.response.finish_reasons"] == ["stop"]
    assert chat["tierax.cached_tokens.device"] == 0
    assert 0 < chat["tierax.time_to_first_token"] <= chat["seconds"] < 5
    assert completion["name"] == "text_completion fake"
    assert completion["parent"] == ""
    assert "secret" not in str(collector.spans)
    assert "Hello" not in str(collector.spans)


async def test_how_a_generation_ended_is_told(serve, collector):
    live = await serve(babble, otlp_endpoint=f"{collector.url}/v1/traces", step_seconds=0.01)
    stream = await live.open_stream("/v1/completions", max_tokens=500)
    await stream.content.readany()
    stream.close()
    await eventually(lambda: live.engine.stats.running == 0)
    live.thread.fault = "broken"
    assert (await live.post("/v1/completions", {"prompt": "x"}))[0] == 500
    await live.stop()
    left, broken = collector.spans
    assert left["gen_ai.response.finish_reasons"] == ["abort"]
    assert "error.type" not in left
    assert left["status"] == 0
    assert broken["error.type"] == "engine_error"
    assert broken["status"] == 2


async def test_a_collector_that_is_away_harms_nobody(serve, collector, caplog):
    live = await serve(say("Hello"), otlp_endpoint="http://127.0.0.1:1")
    assert (await live.complete("a prompt"))["choices"][0]["text"] == "Hello"
    await asyncio.wait_for(live.stop(), 20)


async def test_without_the_packages_it_is_said_what_to_install(monkeypatch):
    for name in ("opentelemetry", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        monkeypatch.setitem(sys.modules, name, None)
    message = r"otlp_endpoint: .* pip install 'tierax\[otlp\]'"
    with pytest.raises(ConfigError, match=message):
        Tracer("http://localhost:4318", lambda: 0.0, lambda: 0.0)
    # Before any model is loaded.
    with pytest.raises(ConfigError, match=message):
        run(EngineConfig(model_path="nowhere"), ServerConfig(port=0, otlp_endpoint="http://localhost:4318"))


async def test_a_wrong_endpoint_is_refused():
    with pytest.raises(ConfigError, match="otlp_endpoint: 'localhost:4318' must be a URL"):
        ServerConfig(otlp_endpoint="localhost:4318")
