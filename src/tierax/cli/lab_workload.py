"""`tierax lab workload`: writes a synthetic trace of conversations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .lab_options import add_json_option, count, not_negative, positive
from .option import Parser

NUMBERS: dict[str, tuple[Any, str]] = {
    "sessions": (count, "conversations"),
    "turns": (positive, "turns of a conversation, in the mean"),
    "systems": (count, "different system prompts"),
    "zipf": (not_negative, "exponent of their popularity; 0 = all alike"),
    "system_tokens": (count, "tokens of a system prompt"),
    "first_tokens": (count, "tokens of a first message, in the mean"),
    "user_tokens": (count, "tokens of a later message"),
    "answer_tokens": (count, "tokens of an answer"),
    "spread": (not_negative, "sigma of the logarithms of these three"),
    "think": (not_negative, "seconds from an answer to the next message"),
    "session_rate": (positive, "conversations that begin per second"),
    "longest": (count, "tokens that no conversation passes"),
    "seed": (int, "of all that is drawn"),
}
"""Fields of `lab.workload.Workload` that have a flag."""


def run(argv: list[str]) -> int:
    from ..lab.workload import PRESETS

    parser = Parser(
        "tierax lab workload",
        "Write synthetic conversations as a trace: prompts named by blocks of 16 tokens, no text.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the trace to write (.jsonl)")
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="sharegpt", help="what the other flags change"
    )
    for name, (convert, text) in NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=convert, metavar="N", help=text)
    add_json_option(parser)
    args = parser.parse_args(argv)
    report = write(args)

    from ..bench.report import table, write_json

    if args.json is not None:
        write_json(report, args.json)
    else:
        print(table(["", args.out.name], [[key.replace("_", " "), f"{report[key]:,.5g}"] for key in report]))
    return 0


def write(args: argparse.Namespace) -> dict[str, float]:
    """Writes the trace; returns what it is like."""
    from dataclasses import replace

    from ..lab.oracle import infinite
    from ..lab.traces.own import write_file
    from ..lab.workload import PRESETS, make_workload

    given = {name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None}
    workload = replace(PRESETS[args.preset], **given)
    trace = make_workload(workload, args.out.stem)
    write_file(trace, args.out)
    print(f"wrote {args.out}", file=sys.stderr)
    requests = trace.requests
    sessions = len({request.session for request in requests})
    return {
        "requests": len(requests),
        "sessions": sessions,
        "turns": len(requests) / sessions,
        "prompt_tokens_mean": trace.prompt_tokens / len(requests),
        "output_tokens_mean": sum(request.output_tokens for request in requests) / len(requests),
        "hours": max(request.arrival for request in requests) / 3600,
        "infinite_hit_rate": infinite(trace).token_hit_rate,
    }
