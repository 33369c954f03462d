"""The `serve` fixture: live servers that are gone after the test."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio

from helpers.fake_engine import FakeEngine, Script, babble
from helpers.live_server import Live
from tierax.engine.replicas import Replicas
from tierax.serving.config import ServerConfig

Serve = Callable[..., Awaitable[Live]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(script, engine=…, step_seconds=…, max_running=…, api_key=…)` starts a server."""
    started: list[Live] = []

    async def start(
        script: Script = babble,
        *,
        engine: FakeEngine | Replicas | None = None,
        step_seconds: float = 0.0,
        max_running: int = 64,
        now: Callable[[], float] = time.time,
        **config: Any,
    ) -> Live:
        live = await Live.start(
            engine or FakeEngine(script),
            ServerConfig(**config),
            step_seconds=step_seconds,
            max_running=max_running,
            now=now,
        )
        started.append(live)
        return live

    yield start
    for live in started:
        await live.stop()
