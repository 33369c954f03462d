"""One table of flags: their spellings, the settings they fill, and those that later versions will honour."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..engine.config import DTYPES, ConfigError, EngineConfig, parse_size
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
    """Flags that fill one setting. `const` makes it a switch; otherwise `convert` reads the value."""

    field: str
    flags: tuple[str, ...]
    help: str
    convert: Callable[[str], Any] = str
    metavar: str | None = None
    const: Any = None


def _fraction(text: str) -> str:
    """`0.4` -> `40%`, the spelling of `device_cache_size`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0 and at most 1")
    return f"{value * 100:.10g}%"


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
    Option("dtype", ("--dtype",), f"compute dtype: {', '.join(DTYPES)}"),
    Option(
        "kv_cache_dtype",
        ("--kv-cache-dtype",),
        "dtype of stored KV: auto, f32, bf16 (fp8 runs as auto, with a warning)",
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
        "schedule_policy",
        ("--schedule-policy",),
        "order of waiting requests: fcfs, lpm (longest cached prefix first)",
    ),
    Option(
        "eviction_policy",
        ("--eviction-policy", "--radix-eviction-policy"),
        "which cached page goes first: lru, or your own as module:Class",
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

SERVER_OPTIONS = (
    Option("host", ("--host",), "address to listen on (127.0.0.1)"),
    Option("port", ("--port",), "TCP port (30000); 0 = any free one", int, "N"),
    Option("api_key", ("--api-key",), "demand this key as a bearer token"),
    Option("log_level", ("--log-level",), ", ".join(LOG_LEVELS), str.lower),
    Option("max_body_size", ("--max-body-size",), "largest request body, e.g. 32MiB", _size, "SIZE"),
    Option(
        "shutdown_timeout",
        ("--shutdown-timeout",),
        "seconds that running requests get after SIGTERM",
        float,
        "S",
    ),
)

NAME_OPTION = Option("served_model_name", ("--served-model-name",), "name in /v1/models and in answers")


@dataclass(frozen=True, slots=True)
class Deferred:
    """Flags of coming versions, accepted so that a launch line starts today; `quiet` values already hold true."""

    flags: tuple[str, ...]
    metavar: str | None
    quiet: tuple[str, ...] = ()


DEFERRED_OPTIONS = (
    Deferred(("--host-cache-size",), "SIZE", quiet=("0",)),
    Deferred(("--host-disk-cache-dir",), "DIR"),
    Deferred(("--disk-cache-size",), "SIZE", quiet=("0",)),
    Deferred(("--write-policy",), "POLICY"),
    Deferred(("--prefetch-policy", "--prefill-priority"), "POLICY"),
    # Without a tier to prefetch from, prefetch is off as asked.
    Deferred(("--disable-prefetch", "--disable-prefill-preemption"), None, quiet=("on",)),
)


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option], title: str) -> None:
    """Adds rows of the table; an absent flag leaves no trace, so the dataclass defaults stand."""
    group = parser.add_argument_group(title)
    for option in options:
        kwargs: dict[str, Any] = {"dest": option.field, "help": option.help, "default": argparse.SUPPRESS}
        if option.const is not None:
            group.add_argument(*option.flags, action="store_const", const=option.const, **kwargs)
        else:
            metavar = option.metavar or option.flags[0].rsplit("-", 1)[-1].upper()
            group.add_argument(*option.flags, type=option.convert, metavar=metavar, **kwargs)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, those accepted ahead of their time, and MODEL as a bare word."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the same as --model-path; demo when neither is given"
    )
    add_options(parser, ENGINE_OPTIONS, "engine")
    group = parser.add_argument_group("accepted, with a warning, until the tiers below the device exist")
    for row in DEFERRED_OPTIONS:
        dest = _deferred_dest(row)
        if row.metavar is None:
            group.add_argument(*row.flags, dest=dest, action="store_const", const="on")
        else:
            group.add_argument(*row.flags, dest=dest, metavar=row.metavar)
    group.add_argument(
        "--tp-size", "--tensor-parallel-size", type=int, default=1, metavar="N", help="only 1 in this version"
    )


def engine_config(values: Mapping[str, Any], parser: Parser) -> EngineConfig:
    """The engine's settings out of parsed flags. Warns on stderr about what this version runs without."""
    if values["tp_size"] != 1:
        parser.error(
            f"--tp-size {values['tp_size']}: this version runs on one device; leave it away or use 1"
        )
    settings = pick(values, (*ENGINE_OPTIONS, NAME_OPTION))
    word = values["model"]
    if word is not None and settings.setdefault("model_path", word) != word:
        parser.error(f"two models given: {word} and {settings['model_path']}")
    settings.setdefault("model_path", "demo")
    if str(settings.get("kv_cache_dtype", "")).startswith("fp8"):
        _warn(
            f"--kv-cache-dtype {settings.pop('kv_cache_dtype')} is not available in this version: running with auto"
        )
    for row in DEFERRED_OPTIONS:
        given = values[_deferred_dest(row)]
        if given is not None and given not in row.quiet:
            _warn(f"{row.flags[0]} is not available in this version: running without it")
    return EngineConfig(**settings)


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """The server's settings out of parsed flags."""
    return ServerConfig(**pick(values, SERVER_OPTIONS))


def pick(values: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """The settings among `values` that these rows fill and the user gave."""
    return {option.field: values[option.field] for option in options if option.field in values}


def _deferred_dest(row: Deferred) -> str:
    return "later_" + row.flags[0].strip("-").replace("-", "_")


def _warn(message: str) -> None:
    print(f"tierax: warning: {message}", file=sys.stderr)
