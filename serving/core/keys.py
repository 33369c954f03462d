"""Typed keys of what the application holds for its handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    # The keys are for everybody, also for those whom these import.
    from ...engine.cache_control import CacheControl
    from ..batch.runner import BatchRunner
    from ..config import ServerConfig
    from ..responses.store import ResponseStore
    from .service import Service

SERVICE: web.AppKey[Service] = web.AppKey("service")
CONFIG: web.AppKey[ServerConfig] = web.AppKey("config")
CONTROL: web.AppKey[CacheControl] = web.AppKey("control")
RESPONSES: web.AppKey[ResponseStore] = web.AppKey("responses")
BATCHES: web.AppKey[BatchRunner] = web.AppKey("batches")
NOW: web.AppKey[Callable[[], float]] = web.AppKey("now")
"""Wall clock in seconds since 1970, for `created` fields only."""
