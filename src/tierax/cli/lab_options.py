"""Options that several parts of the lab share."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentTypeError
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
