"""Settings of the HTTP face. Pure: no aiohttp, no jax."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.config import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen and what to accept. A bad value raises `ConfigError`."""

    host: str = "127.0.0.1"
    port: int = 30000
    """TCP port; 0 = any free one."""
    api_key: str | None = None
    """When set, requests need `Authorization: Bearer <key>`; `/health`, `/ready` and `/metrics` stay open."""
    log_level: str = "info"
    max_body_size: int = 32 * 2**20
    """Bytes of a request body, after decompression; above it the answer is 413."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host: give an address to listen on, e.g. 127.0.0.1 or 0.0.0.0")
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port!r} must be a number from 0 to 65535")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key: an empty key would lock nobody out; leave the setting away")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level: {self.log_level!r} must be one of {', '.join(LOG_LEVELS)}")
        if self.max_body_size < 1:
            raise ConfigError(f"max_body_size: {self.max_body_size!r} must be at least 1 byte")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout: {self.shutdown_timeout!r} must not be negative")
