"""Settings of the HTTP face. Pure: no aiohttp, no jax."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ..engine.config import ConfigError
from .events.config import KvEventsConfig
from .parsers.choose import REASONING_PARSERS, TOOL_CALL_PARSERS

METRICS_ALIASES = ("sglang", "vllm")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")

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
    """More keys out of a file: lines `KEY [TENANT]`, a JSON object key -> tenant or null, or a JSON list of objects with
    `key`, `tenant` and `max_concurrency`. Requests of a key with a tenant share KV with no other tenant's."""
    admin_key: str | None = None
    """The key that operators' routes need then (flush, clear, stat, dashboard …). Without one, any key without a tenant will do."""
    metrics_key: str | None = None
    """The key that `/metrics` needs then, and that opens nothing else."""
    ssl_certfile: str | None = None
    """Certificate chain in PEM form; with it the server speaks HTTPS only."""
    ssl_keyfile: str | None = None
    """The certificate's private key, unless it is in the same file."""
    cors_origin: str | Sequence[str] = ()
    """Origins whose pages may call the server, e.g. `https://chat.example.com`; `*` = all. By default none."""
    log_level: str = "info"
    max_body_size: int = 32 * 2**20
    """Bytes of a request body, after decompression; above it the answer is 413."""
    max_queued_requests: int = 2048
    """Choices that may wait beside those that run; what comes on top is refused with 503."""
    request_timeout: float = 0.0
    """Seconds that a call may take in all, waiting included; 0 = as long as it likes."""
    read_timeout: float = 60.0
    """Seconds in which a request's body must have come."""
    write_timeout: float = 60.0
    """Seconds that a client may leave a stream unread before it is cut off."""
    idle_timeout: float = 75.0
    """Seconds that a connection may stand without a (whole) request's headers."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    disk_drain_timeout: float = 10.0
    """Seconds that writes to the disk cache get after that."""
    warmup_file: str | None = None
    """Prompts to compute before the server is ready: a JSON object per line."""
    pin_quota: str | float = "50%"
    """Share of the host cache that may be pinned: `50%`, or 0.5."""
    reasoning_parser: str = "auto"
    """How the model writes its reasoning: `think`, `none`, or `auto` to go by the chat template."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: `hermes`, `llama3`, `none`, or `auto` to go by the chat template."""

    data_dir: str = "auto"
    """Where files and batches are kept: a directory, `auto` for one of the model's own below `$XDG_DATA_HOME/tierax`
    (`~/.local/share/tierax`), made when first needed, or `none` for no files and batches."""
    data_quota: int = 20 * 2**30
    """Bytes that all uploaded files and results together may take; above it uploads are refused."""
    max_file_size: int = 200 * 2**20
    """Bytes of an uploaded file."""
    batch_concurrency: int = 16
    """Lines of batches that are answered at once."""

    otlp_endpoint: str | None = None
    """Collector that gets an OpenTelemetry span of every generation, e.g. http://localhost:4318."""
    kv_events: str | None = None
    """Where to publish what enters and leaves the cache: a ZeroMQ endpoint such as `tcp://*:5557`, or vLLM's JSON object
    of settings."""
    metrics_alias: str | None = None
    """Engine under whose names `/metrics` shows the most used metrics once more: `sglang` or `vllm`."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host: give an address to listen on, e.g. 127.0.0.1 or 0.0.0.0")
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port!r} must be a number from 0 to 65535")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("api_key: an empty key would lock nobody out; leave the setting away")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level: {self.log_level!r} must be one of {', '.join(LOG_LEVELS)}")
        for name in ("admin_key", "metrics_key"):
            if (key := getattr(self, name)) is not None and not key.strip():
                raise ConfigError(f"{name}: an empty key would lock nobody out; leave the setting away")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile: give ssl_certfile, too")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin: {origin!r} must be like https://chat.example.com, without a path, or *"
                )
        if self.max_queued_requests < 0:
            raise ConfigError(f"max_queued_requests: {self.max_queued_requests!r} must be 0 or more")
        for name in ("read_timeout", "write_timeout", "idle_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{name}: {seconds!r} must be seconds, more than 0")
        if self.max_body_size < 1:
            raise ConfigError(f"max_body_size: {self.max_body_size!r} must be at least 1 byte")
        for name in ("shutdown_timeout", "disk_drain_timeout", "request_timeout"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name}: {seconds!r} must be seconds, 0 or more")
        for name in ("data_quota", "max_file_size", "batch_concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)!r} must be at least 1")
        if not self.data_dir:
            raise ConfigError("data_dir: give a directory, auto or none")
        self.pin_share()
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint: {self.otlp_endpoint!r} must be a URL, e.g. http://localhost:4318"
            )
        self.kv_events_config()
        if self.metrics_alias not in (None, *METRICS_ALIASES):
            raise ConfigError(
                f"metrics_alias: {self.metrics_alias!r} must be one of {', '.join(METRICS_ALIASES)}"
            )
        for name, known in (("reasoning_parser", REASONING_PARSERS), ("tool_call_parser", TOOL_CALL_PARSERS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}: {getattr(self, name)!r} must be one of {', '.join(known)}")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of `api_key`."""
        given = self.api_key
        return () if given is None else (given,) if isinstance(given, str) else tuple(given)

    @property
    def locked(self) -> bool:
        """Whether all requests need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The origins of `cors_origin`."""
        given = self.cors_origin
        return (given,) if isinstance(given, str) else tuple(given)

    def kv_events_config(self) -> KvEventsConfig | None:
        """`kv_events` taken apart; None = nothing is published. Raises `ConfigError`."""
        return None if self.kv_events is None else KvEventsConfig.parse(self.kv_events)

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
