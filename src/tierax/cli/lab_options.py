"""Options that several parts of the lab share."""

from __future__ import annotations

import argparse
import contextlib
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..lab.traces.trace import Trace


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", required=True, type=Path, metavar="FILE", help="a trace; .zst is unpacked")
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="mooncake, agentic, ragpulse, azure or tierax (default: told from the first line)",
    )
    parser.add_argument(
        "--max-requests", type=count, metavar="N", help="only the first N requests of the trace"
    )
    parser.add_argument(
        "--max-sessions",
        type=count,
        metavar="N",
        help="only the first N sessions, for traces of whole sessions",
    )
    parser.add_argument(
        "--session-rate",
        type=positive,
        default=0.05,
        metavar="X",
        help="sessions that start per second, for traces with relative times only (default: 0.05)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn at random")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is the standard output")


def read_trace(args: argparse.Namespace) -> Trace:
    """The trace that the options name; what was assumed in reading it goes to stderr."""
    from ..lab.traces.read import Options, load_trace

    options = Options(args.seed, args.session_rate, args.max_sessions)
    trace = load_trace(args.trace, args.format, options)
    for note in trace.notes:
        print(f"{trace.name}: {note}", file=sys.stderr)
    return trace if args.max_requests is None else trace.head(args.max_requests)


def load_policy_of(parser: argparse.ArgumentParser, flag: str, name: str) -> Any:
    """A new eviction policy by its name on the command line."""
    from ..cache.policies.registry import load_policy

    try:
        return load_policy(name)
    except ValueError as error:
        parser.error(f"{flag}: {error}")


def count(text: str) -> int:
    """A whole number above 0; `_` and `,` may separate digits."""
    digits = text.replace("_", "")
    if not digits.isascii() or not digits.isdigit() or int(digits) < 1:
        raise ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(digits)


def counts(text: str) -> list[int]:
    return [count(item) for item in text.split(",")]


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def names(text: str) -> list[str]:
    found = [item.strip() for item in text.split(",") if item.strip()]
    if not found:
        raise ArgumentTypeError("at least one name is needed")
    return found


def add_pace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate", type=positive, default=1.0, metavar="X", help="arrivals come X times as fast as recorded"
    )
    parser.add_argument(
        "--closed",
        action="store_true",
        help="a later turn comes its think time after the end of the one before, where the trace knows it",
    )
    parser.add_argument(
        "--users",
        type=count,
        metavar="N",
        help="N sessions at a time, each followed by the next; recorded arrivals do not count",
    )


def pace_of(args: argparse.Namespace) -> Any:
    from ..lab.arrivals import Pace

    return Pace(args.rate, args.closed, args.users)


def add_setup_options(parser: argparse.ArgumentParser) -> None:
    """The machine and the cache that are simulated."""
    add = parser.add_argument_group("machine and cache", "names and sizes as in tierax serve").add_argument
    add(
        "--model",
        default="qwen3-8b",
        metavar="NAME",
        help="qwen3-8b, llama-3.1-8b, llama-3.1-70b, smollm2-135m",
    )
    add("--device", default="a100-80g", metavar="NAME",
        help="a100-80g, h100, h200, l4, tpu-v5e, tpu-v6e, this-cpu")  # fmt: skip
    add("--devices", type=count, default=1, metavar="N", help="accelerators that share the model")
    add("--calibration", type=Path, metavar="FILE",
        help="step times as tierax bench offline --json measured them, in place of the device's roofline")  # fmt: skip
    add("--page-size", type=count, metavar="N", help="tokens of a page (default: of the trace's blocks)")
    add("--kv-cache-dtype", choices=("auto", "f32", "bf16", "fp8"), default="auto")
    add(
        "--device-cache-size",
        default="auto",
        metavar="SIZE",
        help="e.g. 40GB (default: what the weights leave)",
    )
    add(
        "--host-cache-size",
        default="0",
        metavar="SIZE",
        help="e.g. 200GB, or 4x the device cache (default: 0)",
    )
    add("--disk-cache-size", default="0", metavar="SIZE", help="default: 0, no disk cache")
    add("--disable-radix-cache", action="store_true", help="nothing is ever shared")
    add("--eviction-policy", default="lru", metavar="NAME")
    add("--host-eviction-policy", metavar="NAME")
    add("--disk-eviction-policy", metavar="NAME")
    add("--write-policy", default="write_through", metavar="NAME")
    add("--prefetch-policy", default="timeout=300ms", metavar="NAME")
    add("--disable-prefetch", action="store_true", help="reads begin only when a request's turn has come")
    add("--schedule-policy", default="fcfs", metavar="NAME")
    add("--max-num-seqs", type=count, default=256, metavar="N")
    add("--max-num-batched-tokens", type=count, default=2048, metavar="N")
    add("--shared-step-tokens", type=count, metavar="N")
    add("--accelerator-hour", type=positive, metavar="USD", help="default: the device's")
    add("--dram-gb-month", type=not_negative, default=0.05, metavar="USD", help="default: 0.05")
    add("--ssd-gb-month", type=not_negative, default=0.01, metavar="USD", help="default: 0.01")
    add("--million-ios", type=not_negative, default=0.0, metavar="USD",
        help="for a million pages read from, written to or deleted from the disk tier (default: 0)")  # fmt: skip


_KV_BYTES = {"f32": 4, "bf16": 2, "fp8": 1}


def setup_of(parser: argparse.ArgumentParser, args: argparse.Namespace, trace: Trace) -> Any:
    """What the options describe; mistakes are the parser's errors."""
    from dataclasses import replace

    from ..lab.presets import device_of, model_of
    from ..lab.prices import Prices
    from ..lab.setup import Setup

    device = device_of(args.device)
    if args.kv_cache_dtype != "auto":
        device = replace(device, kv_itemsize=_KV_BYTES[args.kv_cache_dtype])
    prices = Prices(
        args.accelerator_hour or device.hour_usd, args.dram_gb_month, args.ssd_gb_month, args.million_ios
    )
    setup = Setup(
        model=model_of(args.model),
        device=device,
        devices=args.devices,
        page_tokens=args.page_size or trace.block_tokens,
        device_bytes=None
        if args.device_cache_size == "auto"
        else _size(parser, "--device-cache-size", args.device_cache_size),
        caching=not args.disable_radix_cache,
        eviction_policy=args.eviction_policy,
        host_eviction_policy=args.host_eviction_policy,
        disk_eviction_policy=args.disk_eviction_policy,
        write_policy=args.write_policy,
        prefetch_policy=args.prefetch_policy,
        prefetch_on_arrival=not args.disable_prefetch,
        schedule_policy=args.schedule_policy,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        shared_step_tokens=args.shared_step_tokens,
        prices=prices,
        measured=_calibration(args.calibration),
    )
    device_bytes = setup.device_pages() * setup.page_bytes
    setup = replace(
        setup,
        host_bytes=_size(parser, "--host-cache-size", args.host_cache_size, device_bytes),
        disk_bytes=_size(parser, "--disk-cache-size", args.disk_cache_size),
    )
    try:
        setup.check()
    except ValueError as error:
        parser.error(str(error))
    return setup


def _calibration(path: Path | None) -> Any:
    if path is None:
        return None
    from ..lab.calibration import read_steps

    return read_steps(path)


def _size(parser: argparse.ArgumentParser, flag: str, text: str, device_bytes: int | None = None) -> int:
    """Bytes; with `device_bytes` also `4x` these."""
    from ..engine.config import ConfigError, parse_size

    try:
        if device_bytes is not None and text.endswith("x"):
            return int(float(text[:-1]) * device_bytes)
        return parse_size(text)
    except (ConfigError, ValueError):
        parser.error(f"{flag}: {text!r} is not a size; write bytes or e.g. 2GiB, 512MiB, 1.5GB")


def not_negative(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else positive(text)


@contextlib.contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal's stderr; what is yielded takes how many more requests have ended."""
    from tqdm import tqdm

    with tqdm(desc=name or None, total=total, unit="request", disable=not sys.stderr.isatty()) as bar:
        yield bar.update
