"""Typed keys of what the application holds for its handlers."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from ..engine.cache_control import CacheControl
from .config import ServerConfig
from .generation import Service

SERVICE = web.AppKey("service", Service)
CONFIG = web.AppKey("config", ServerConfig)
CONTROL = web.AppKey("control", CacheControl)
NOW: web.AppKey[Callable[[], float]] = web.AppKey("now")
"""Wall clock in seconds since 1970, for `created` fields only."""
