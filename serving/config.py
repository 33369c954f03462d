"""Settings of the HTTP face. Pure: no aiohttp, no jax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ..engine.config import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen and what to accept. A bad value raises `ConfigError`."""

    host: str = "127.0.0.1"
    port: int = 30000
    """TCP port; 0 = any free one."""
    api_key: str | Sequence[str] | None = None
    """One key or several. With any, requests need `Authorization: Bearer <key>`; `/health` and `/ready` stay open."""
    api_key_file: str | None = None
    """More keys out of a file, with or without a salt each: lines `KEY [SALT]`, or a JSON object key -> salt or null.
    Requests of a key with a salt share KV with no other salt's."""
    log_level: str = "info"
    max_body_size: int = 32 * 2**20
    """Bytes of a request body, after decompression; above it the answer is 413."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    disk_drain_timeout: float = 10.0
    """Seconds that writes to the disk cache get after that."""
    warmup_file: str | None = None
    """Prompts to compute before the server is ready: a JSON object per line."""
    pin_quota: str | float = "50%"
    """Share of the host cache that may be pinned: `50%`, or 0.5."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host: give an address to listen on, e.g. 127.0.0.1 or 0.0.0.0")
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port!r} must be a number from 0 to 65535")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("api_key: an empty key would lock nobody out; leave the setting away")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level: {self.log_level!r} must be one of {', '.join(LOG_LEVELS)}")
        if self.max_body_size < 1:
            raise ConfigError(f"max_body_size: {self.max_body_size!r} must be at least 1 byte")
        for name in ("shutdown_timeout", "disk_drain_timeout"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name}: {seconds!r} must be seconds, 0 or more")
        self.pin_share()

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of `api_key`."""
        given = self.api_key
        return () if given is None else (given,) if isinstance(given, str) else tuple(given)

    @property
    def locked(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    def pin_share(self) -> float:
        """`pin_quota` as a number from 0 to 1. Raises `ConfigError`."""
        given = self.pin_quota
        try:
            share = float(given.removesuffix("%")) / 100 if _is_percent(given) else float(given)
        except (TypeError, ValueError):
            share = math.nan
        if not 0 <= share <= 1:
            raise ConfigError(f"pin_quota: {given!r} must be a share from 0% to 100%, e.g. 50% or 0.5")
        return share


def _is_percent(given: object) -> TypeGuard[str]:
    return isinstance(given, str) and given.endswith("%")
