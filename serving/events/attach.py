"""Gives the application a publisher of KV events, which lives as long as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from ...engine.page_events import PageLog, listen
from ..core.keys import SERVICE
from ..core.service import EngineRunner
from ..http.auth import salted
from .config import KvEventsConfig
from .publisher import Publisher


def add_kv_events(
    app: web.Application, thread: EngineRunner, config: KvEventsConfig, now: Callable[[], float]
) -> None:
    """Publishes from the application's start to its end, and shows it at `/metrics`. Raises `ConfigError`.

    Token ids are told of requests without a tenant and a salt only.
    """
    log = PageLog(config.max_queue_size, told={b"", salted(None, None)})
    publisher = Publisher(
        config,
        log,
        page_size=thread.engine.cache.page_size,
        retell=lambda: thread.call(lambda: listen(thread.engine, log)),
        now=now,
    )
    app[SERVICE].metrics.registry.register(publisher)

    async def publish(_: web.Application) -> AsyncIterator[None]:
        publisher.start()
        yield
        await asyncio.to_thread(publisher.close)

    app.cleanup_ctx.append(publish)
