"""Flags of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..serving.config import (
    LOG_LEVELS,
    METRICS_ALIASES,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ServerConfig,
)
from .option import Option, pick, size

SERVER_OPTIONS = (
    Option("host", ("--host",), "address to listen on (127.0.0.1)"),
    Option("port", ("--port",), "TCP port (30000); 0 = any free one", int, "N"),
    Option(
        "api_key",
        ("--api-key",),
        "demand this key as a bearer token; may be repeated",
        many=True,
        metavar="KEY",
    ),
    Option(
        "api_key_file",
        ("--api-key-file",),
        "more keys, with a tenant each that keeps their KV apart: lines KEY [TENANT], or JSON",
    ),
    Option(
        "admin_key",
        ("--admin-key", "--admin-api-key"),
        "what operators' routes need then: flush, clear, stat, dashboard",
    ),
    Option("metrics_key", ("--metrics-key",), "what /metrics needs then"),
    Option("ssl_certfile", ("--ssl-certfile",), "serve HTTPS with this certificate chain (PEM)"),
    Option("ssl_keyfile", ("--ssl-keyfile",), "its private key, unless that is in the same file"),
    Option(
        "cors_origin",
        ("--cors-origin",),
        "let pages of this origin call the server, e.g. https://chat.example.com, or *; may be repeated",
        many=True,
        metavar="ORIGIN",
    ),
    Option(
        "max_queued_requests",
        ("--max-queued-requests",),
        "requests that may wait beside those that run (2048); others are refused with 503",
        int,
        "N",
    ),
    Option(
        "request_timeout",
        ("--request-timeout",),
        "seconds that a call may take in all; 0 = any (the default)",
        float,
        "S",
    ),
    Option(
        "read_timeout",
        ("--read-timeout",),
        "seconds in which a request's body must have come (60)",
        float,
        "S",
    ),
    Option(
        "write_timeout",
        ("--write-timeout",),
        "seconds that a client may leave a stream unread before it is cut off (60)",
        float,
        "S",
    ),
    Option(
        "idle_timeout",
        ("--idle-timeout",),
        "seconds that a connection may stand without a request's headers (75)",
        float,
        "S",
    ),
    Option("log_level", ("--log-level",), ", ".join(LOG_LEVELS), str.lower),
    Option("max_body_size", ("--max-body-size",), "largest request body, e.g. 32MiB", size, "SIZE"),
    Option(
        "shutdown_timeout",
        ("--shutdown-timeout",),
        "seconds that running requests get after SIGTERM",
        float,
        "S",
    ),
    Option(
        "disk_drain_timeout",
        ("--disk-drain-timeout",),
        "seconds that writes to the disk get after that (10)",
        float,
        "S",
    ),
    Option("warmup_file", ("--warmup-file",), "prompts to compute before the server is ready, JSON per line"),
    Option(
        "pin_quota", ("--pin-quota",), "share of the host cache that may be pinned (50%%)", metavar="SHARE"
    ),
    Option("data_dir", ("--data-dir",), "where files and batches are kept: a directory, auto, or none"),
    Option("data_quota", ("--data-quota",), "bytes that they may take together (20GiB)", size, "SIZE"),
    Option("max_file_size", ("--max-file-size",), "largest uploaded file (200MiB)", size, "SIZE"),
    Option(
        "batch_concurrency",
        ("--batch-concurrency",),
        "lines of batches that are answered at once (16)",
        int,
        "N",
    ),
    Option(
        "otlp_endpoint",
        ("--otlp-endpoint",),
        "send an OpenTelemetry span of every generation to this collector, e.g. http://localhost:4318",
        metavar="URL",
    ),
    Option(
        "kv_events",
        ("--kv-events", "--kv-events-config"),
        "publish what enters and leaves the cache: tcp://*:5557, or vLLM's JSON of settings",
        metavar="ENDPOINT",
    ),
    Option(
        "metrics_alias",
        ("--metrics-alias", "--metrics-compat"),
        f"show metrics under this engine's names too: {', '.join(METRICS_ALIASES)}",
        metavar="ENGINE",
    ),
    Option(
        "tool_call_parser",
        ("--tool-call-parser",),
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}; auto goes by its chat template",
    ),
    Option(
        "reasoning_parser",
        ("--reasoning-parser",),
        f"how the model writes its reasoning: {', '.join(REASONING_PARSERS)}; auto goes by its chat template",
    ),
)

SECRETS = {
    "api_key": "TIERAX_API_KEY",
    "admin_key": "TIERAX_ADMIN_KEY",
    "metrics_key": "TIERAX_METRICS_KEY",
}
"""Settings that come from the environment where no flag gives them, so that no list of processes shows them."""


def server_config(values: Mapping[str, Any], environ: Mapping[str, str]) -> ServerConfig:
    """The server's settings out of parsed flags and, for what is secret, the environment."""
    settings: dict[str, Any] = {field: environ[name] for field, name in SECRETS.items() if environ.get(name)}
    if "api_key" in settings:
        # Several keys are separated by blanks.
        settings["api_key"] = settings["api_key"].split()
    settings |= pick(values, SERVER_OPTIONS)
    for field in ("api_key", "cors_origin"):
        if isinstance(settings.get(field), list):
            settings[field] = tuple(settings[field])
    return ServerConfig(**settings)
