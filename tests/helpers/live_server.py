"""A server on a real socket over the scripted engine, and a session to talk to it."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import ClientResponse, ClientSession, web

from helpers.fake_engine import FakeEngine, FakeEngineThread
from helpers.tiered_engine import TieredEngine
from tierax.engine.engine import Engine
from tierax.engine.replicas import Replicas
from tierax.engine.thread import EngineThread
from tierax.serving.app import make_app
from tierax.serving.config import ServerConfig
from tierax.serving.server import bind, make_runner

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@dataclass
class Live:
    """A running server and the engine beneath."""

    url: str
    session: ClientSession
    engine: Any
    """A `FakeEngine`, or what runs in its place."""
    thread: Any
    """A `FakeEngineThread`, the real thread over a `TieredEngine`, or several of these as `Replicas`."""
    app: web.Application
    runner: web.AppRunner
    data: tempfile.TemporaryDirectory[str]
    """Files and batches, unless the config names another place."""

    @classmethod
    async def start(
        cls,
        engine: FakeEngine | Replicas,
        config: ServerConfig,
        *,
        now: Callable[[], float] = time.time,
        **thread_options: Any,
    ) -> Live:
        data = tempfile.TemporaryDirectory()
        if config.data_dir == "auto":
            # Never the directory of whoever runs the tests.
            config = dataclasses.replace(config, data_dir=data.name)
        real = isinstance(engine, TieredEngine | Engine | Replicas)
        thread: Any = engine if isinstance(engine, Replicas) else None
        if thread is None:
            thread = (
                EngineThread(cast(Engine, engine)) if real else FakeEngineThread(engine, **thread_options)
            )
        thread.start()
        if real:
            await asyncio.to_thread(thread.wait_ready)
        app = make_app(thread, config, now=now)
        runner = make_runner(app)
        await runner.setup()
        listener = bind("127.0.0.1", 0)
        await web.SockSite(runner, listener).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return cls(url, ClientSession(), engine, thread, app, runner, data)

    async def stop(self) -> None:
        await self.session.close()
        await self.runner.cleanup()
        await asyncio.to_thread(self.thread.close, 1.0)
        self.data.cleanup()

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and JSON of an answer; `body` is bytes or something to encode."""
        data = (
            None
            if body is None
            else io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        )
        async with self.session.request(method, self.url + path, data=data, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        return await self.request("POST", path, body, **options)

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        return await self.request("GET", path, **options)

    async def chat(self, **fields: Any) -> dict[str, Any]:
        """A chat that must succeed."""
        return await self._good(CHAT, {"messages": MESSAGES} | fields)

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        return await self._good(COMPLETIONS, {"prompt": prompt} | fields)

    async def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end with [DONE]."""
        response = await self.open_stream(path, **fields)
        assert response.content_type == "text/event-stream"
        return events_of(await response.text())

    async def open_stream(self, path: str, **fields: Any) -> ClientResponse:
        """A stream that the caller reads or closes."""
        prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
        response = await self.session.post(self.url + path, json=prompt | {"stream": True} | fields)
        assert response.status == 200, await response.text()
        return response

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels."""
        async with self.session.get(self.url + "/metrics") as response:
            assert response.status == 200
            lines = (await response.text()).splitlines()
        return {
            name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))
        }

    async def _good(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events that ends with [DONE]."""
    *blocks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), text[-300:]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


async def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until the condition holds; fails after `seconds`, which a busy machine must not need."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    assert condition(), f"did not come true within {seconds} s"
