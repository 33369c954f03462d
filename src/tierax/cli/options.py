"""One table of flags: their spellings, and the settings they fill."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..engine.config import (
    DTYPES,
    KV_DTYPES,
    POLICIES,
    QUANTIZATIONS,
    WRITE_POLICIES,
    ConfigError,
    EngineConfig,
    parse_size,
)
from ..engine.version import __version__
from ..serving.config import (
    LOG_LEVELS,
    METRICS_ALIASES,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ServerConfig,
)
from .errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes become a `UsageError`, one line without the usage block."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument(
            "--version", action="version", version=f"tierax {__version__}", help="show the version, and exit"
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message)


@dataclass(frozen=True, slots=True)
class Option:
    """Flags that fill one setting. `const` makes it a switch; otherwise `convert` reads the value, or values if `many`."""

    field: str
    flags: tuple[str, ...]
    help: str
    convert: Callable[[str], Any] = str
    metavar: str | None = None
    const: Any = None
    many: bool = False


def _fraction(text: str) -> str:
    """`0.4` -> `40%`, the spelling of `device_cache_size`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0 and at most 1")
    return f"{value * 100:.10g}%"


def _times(text: str) -> str:
    """`2` -> `2x`, the spelling of `host_cache_size`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0: so many times the device cache")
    return f"{value:.10g}x"


def _in_units_of(unit: int) -> Callable[[str], int]:
    """Reads `30` as so many units, and `30GiB` as what it says."""

    def convert(text: str) -> int:
        try:
            size = math.floor(float(text) * unit)
        except (ValueError, OverflowError):
            size = _size(text)
        if size <= 0:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be above 0; --host-cache-size 0 is for no host cache"
            )
        return size

    return convert


def _prefetch_policy(text: str) -> str:
    """`timeout` alone is the one that the engine has by default."""
    return "timeout=300ms" if text == "timeout" else text


def _schedule_policy(text: str) -> str:
    """`priority` asks for what every policy does: requests' priorities count first."""
    return "fcfs" if text == "priority" else text


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size: ")) from None


ENGINE_OPTIONS = (
    Option(
        "model_path",
        ("--model-path", "--model"),
        "a Hugging Face directory, a .gguf file, an Orbax checkpoint, or demo",
    ),
    Option("dtype", ("--dtype",), f"dtype of weights: {', '.join(DTYPES)}"),
    Option("quantization", ("--quantization",), f"of the weights' matrices: {', '.join(QUANTIZATIONS)}"),
    Option(
        "kv_cache_dtype",
        ("--kv-cache-dtype",),
        f"dtype of stored KV: {', '.join(KV_DTYPES)} (e4m3)",
    ),
    Option(
        "tp_size",
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        "devices that the model is split over",
        int,
        "N",
    ),
    Option(
        "dp_size",
        ("--dp-size", "--data-parallel-size", "--dp"),
        "copies of the model in this process, each on --tp-size devices of its own",
        int,
        "N",
    ),
    Option(
        "coordinator_address",
        ("--coordinator-address", "--dist-init-addr"),
        "where several processes run one model: process 0, whose next port is used too",
        metavar="HOST:PORT",
    ),
    Option("num_processes", ("--num-processes", "--nnodes"), "how many they are", int, "N"),
    Option("process_id", ("--process-id", "--node-rank"), "which of them this is, from 0", int, "N"),
    Option("page_size", ("--page-size", "--block-size"), "tokens per page", int, "N"),
    Option(
        "device_cache_size",
        ("--device-cache-size",),
        "device memory of the page pool: auto, bytes, 2GiB, or 40%% of what is available once weights are loaded",
        metavar="SIZE",
    ),
    Option(
        "device_cache_size",
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        "the same as a fraction, 0.4 = 40%%",
        _fraction,
        "X",
    ),
    Option(
        "max_num_seqs", ("--max-num-seqs", "--max-running-requests"), "requests running at once", int, "N"
    ),
    Option(
        "max_num_batched_tokens",
        ("--max-num-batched-tokens", "--chunked-prefill-size"),
        "tokens computed in one step, prefill and decode together",
        int,
        "N",
    ),
    Option(
        "context_length",
        ("--context-length", "--max-model-len"),
        "longest prompt plus output, in tokens",
        int,
        "N",
    ),
    Option(
        "attention_backend",
        ("--attention-backend",),
        "kernels of the step: auto, tpu (TPU v5e and newer), native (CPU), mosaic-gpu (NVIDIA Hopper), triton (NVIDIA from Ampere on), xla (runs everywhere)",
    ),
    Option(
        "schedule_policy",
        ("--schedule-policy", "--scheduling-policy"),
        "order of waiting requests of one priority: fcfs, lpm (longest cached prefix first)",
        _schedule_policy,
        "POLICY",
    ),
    Option(
        "eviction_policy",
        ("--eviction-policy", "--radix-eviction-policy"),
        f"which cached page goes first: {', '.join(POLICIES)} (ttl=1h), or your own as module:Class",
    ),
    Option(
        "disable_radix_cache",
        ("--disable-radix-cache", "--no-enable-prefix-caching"),
        "share no KV",
        const=True,
    ),
    Option(
        "disable_radix_cache",
        ("--enable-prefix-caching",),
        "share KV between requests (the default)",
        const=False,
    ),
    Option("seed", ("--seed", "--random-seed"), "seed of requests that bring none", int, "N"),
    Option(
        "skip_warmup",
        ("--skip-warmup", "--skip-server-warmup"),
        "compile when first needed, not at start",
        const=True,
    ),
    Option(
        "compile_cache_dir",
        ("--compile-cache-dir",),
        "where compiled programs persist: auto, none, or a directory",
    ),
    Option(
        "trace_out",
        ("--trace-out",),
        "record requests in this new file for tierax lab: times, lengths and hashes, no text",
        metavar="FILE",
    ),
)

HIERARCHICAL_SIZE = "2x"
"""What --enable-hierarchical-cache alone stands for, as it does where it comes from."""

TIER_OPTIONS = (
    Option(
        "host_cache_size",
        ("--host-cache-size",),
        "host memory for KV: auto, bytes, 2GiB, 40%% of what is available, 2x the device cache, or 0 for none",
        metavar="SIZE",
    ),
    Option(
        "host_cache_size", ("--hicache-ratio",), "the same as so many times the device cache", _times, "X"
    ),
    Option(
        "host_cache_size", ("--hicache-size",), "the same in GB (or 30GiB)", _in_units_of(1000**3), "SIZE"
    ),
    Option(
        "host_cache_size",
        ("--kv-offloading-size",),
        "the same in GiB (or 30GB)",
        _in_units_of(1024**3),
        "SIZE",
    ),
    Option(
        "hierarchical",
        ("--enable-hierarchical-cache",),
        f"the same as --host-cache-size {HIERARCHICAL_SIZE}, unless another size is given",
        const=True,
    ),
    Option(
        "host_disk_cache_dir",
        ("--host-disk-cache-dir",),
        "where KV outlives the process: a directory, or s3://…, gs://…, file://…",
        metavar="DIR",
    ),
    Option("disk_cache_size", ("--disk-cache-size",), "most bytes that it takes (20GiB)", metavar="SIZE"),
    Option(
        "disk_free_space",
        ("--disk-free-space",),
        "bytes of its file system that stay free (1GiB)",
        metavar="SIZE",
    ),
    Option(
        "disk_cache_read_only", ("--disk-cache-read-only",), "read it, but write nothing to it", const=True
    ),
    Option(
        "disk_cache_refresh",
        ("--disk-cache-refresh",),
        "seconds between looks for what other processes have written to it (30); 0 = only at start",
        float,
        "S",
    ),
    Option(
        "disk_cache_shared",
        ("--disk-cache-shared",),
        "other servers write to the same disk cache, all of them with this flag",
        const=True,
    ),
    Option(
        "disk_cache_lease",
        ("--disk-cache-lease",),
        "seconds after which a server that shares it and is not heard of counts as dead (30); the same for all",
        float,
        "S",
    ),
    Option(
        "host_eviction_policy",
        ("--host-eviction-policy",),
        "which page leaves the host first (as --eviction-policy)",
        metavar="POLICY",
    ),
    Option(
        "disk_eviction_policy",
        ("--disk-eviction-policy",),
        "which page leaves the disk first (as --eviction-policy)",
        metavar="POLICY",
    ),
    Option(
        "write_policy",
        ("--write-policy", "--hicache-write-policy"),
        f"when KV goes down to the host: {', '.join(WRITE_POLICIES)}",
        metavar="POLICY",
    ),
    Option(
        "prefetch_policy",
        ("--prefetch-policy", "--prefill-priority", "--hicache-storage-prefetch-policy"),
        "how long a request waits for the disk: best_effort, wait_complete, timeout=300ms",
        _prefetch_policy,
        "POLICY",
    ),
    Option(
        "prefetch_max_wait", ("--prefetch-max-wait",), "seconds that bound every such wait (10)", float, "S"
    ),
    Option(
        "disable_prefetch",
        ("--disable-prefetch", "--disable-prefill-preemption"),
        "read from the disk only when a request's turn has come",
        const=True,
    ),
)

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
    Option("max_body_size", ("--max-body-size",), "largest request body, e.g. 32MiB", _size, "SIZE"),
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
    Option("data_quota", ("--data-quota",), "bytes that they may take together (20GiB)", _size, "SIZE"),
    Option("max_file_size", ("--max-file-size",), "largest uploaded file (200MiB)", _size, "SIZE"),
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

NAME_OPTION = Option("served_model_name", ("--served-model-name",), "name in /v1/models and in answers")


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option], title: str) -> None:
    """Adds rows of the table; an absent flag leaves no trace, so the dataclass defaults stand."""
    group = parser.add_argument_group(title)
    for option in options:
        kwargs: dict[str, Any] = {"dest": option.field, "help": option.help, "default": argparse.SUPPRESS}
        if option.const is not None:
            group.add_argument(*option.flags, action="store_const", const=option.const, **kwargs)
        else:
            metavar = option.metavar or option.flags[0].rsplit("-", 1)[-1].upper()
            action = "append" if option.many else "store"
            group.add_argument(*option.flags, type=option.convert, metavar=metavar, action=action, **kwargs)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, and MODEL as a bare word."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the same as --model-path; demo when neither is given"
    )
    add_options(parser, ENGINE_OPTIONS, "engine")
    add_options(parser, TIER_OPTIONS, "tiers below the device")


def engine_config(values: Mapping[str, Any], parser: Parser) -> EngineConfig:
    """The engine's settings out of parsed flags."""
    settings = pick(values, (*ENGINE_OPTIONS, *TIER_OPTIONS, NAME_OPTION))
    if settings.pop("hierarchical", False):
        settings.setdefault("host_cache_size", HIERARCHICAL_SIZE)
    word = values["model"]
    if word is not None and settings.setdefault("model_path", word) != word:
        parser.error(f"two models given: {word} and {settings['model_path']}")
    settings.setdefault("model_path", "demo")
    return EngineConfig(**settings)


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


def pick(values: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """The settings among `values` that these rows fill and the user gave."""
    return {option.field: values[option.field] for option in options if option.field in values}
