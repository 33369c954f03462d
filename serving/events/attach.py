"""Gives the application a publisher of KV events, which lives as long as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from ...engine.page_events import PageLog, listen
from ..core.keys import SERVICE
from ..core.service import EngineRunner
from ..http.auth import salted
from .config import KvEventsConfig
from .publisher import Publisher, Publishers

if TYPE_CHECKING:
    from ...engine.thread import EngineThread


def add_kv_events(
    app: web.Application, thread: EngineRunner, config: KvEventsConfig, now: Callable[[], float]
) -> None:
    """Publishes from the application's start to its end, and shows it at `/metrics`. Raises `ConfigError`.

    Token ids are told of requests without a tenant and a salt only.
    """
    publishers = Publishers([_publisher(config, rank, one, now) for rank, one in enumerate(thread.replicas)])
    app[SERVICE].metrics.registry.register(publishers)

    async def publish(_: web.Application) -> AsyncIterator[None]:
        publishers.start()
        yield
        await asyncio.to_thread(publishers.close)

    app.cleanup_ctx.append(publish)


def _publisher(
    config: KvEventsConfig, rank: int, thread: EngineThread, now: Callable[[], float]
) -> Publisher:
    """Of one copy of the model."""
    log = PageLog(config.max_queue_size, told={b"", salted(None, None)})
    return Publisher(
        config.of_rank(rank),
        log,
        page_size=thread.engine.cache.page_size,
        rank=rank,
        retell=lambda: thread.call(lambda: listen(thread.engine, log)),
        now=now,
    )
