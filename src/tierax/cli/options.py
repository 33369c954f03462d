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
from ..serving.config import LOG_LEVELS, ServerConfig
from .errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes become a `UsageError`, one line without the usage block."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

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
        ("--schedule-policy",),
        "order of waiting requests: fcfs, lpm (longest cached prefix first)",
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
        "more keys, with a salt each that keeps their KV apart: lines KEY [SALT], or JSON",
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
    parser.add_argument(
        "--tp-size", "--tensor-parallel-size", type=int, default=1, metavar="N", help="only 1 in this version"
    )


def engine_config(values: Mapping[str, Any], parser: Parser) -> EngineConfig:
    """The engine's settings out of parsed flags."""
    if values["tp_size"] != 1:
        parser.error(
            f"--tp-size {values['tp_size']}: this version runs on one device; leave it away or use 1"
        )
    settings = pick(values, (*ENGINE_OPTIONS, *TIER_OPTIONS, NAME_OPTION))
    if settings.pop("hierarchical", False):
        settings.setdefault("host_cache_size", HIERARCHICAL_SIZE)
    word = values["model"]
    if word is not None and settings.setdefault("model_path", word) != word:
        parser.error(f"two models given: {word} and {settings['model_path']}")
    settings.setdefault("model_path", "demo")
    return EngineConfig(**settings)


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """The server's settings out of parsed flags."""
    settings = pick(values, SERVER_OPTIONS)
    if "api_key" in settings:
        settings["api_key"] = tuple(settings["api_key"])
    return ServerConfig(**settings)


def pick(values: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """The settings among `values` that these rows fill and the user gave."""
    return {option.field: values[option.field] for option in options if option.field in values}
