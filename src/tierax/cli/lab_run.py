"""`tierax lab run`: a trace through the engine's own scheduler, cache and tiers in simulated time."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .lab_options import (
    add_json_option,
    add_pace_options,
    add_setup_options,
    add_trace_options,
    pace_of,
    positive,
    read_trace,
    setup_of,
)
from .option import Parser

if TYPE_CHECKING:
    from ..lab.result import Result

ROWS = ("none", "DEVICE", "HOST", "DISK")


def run(argv: list[str]) -> int:
    parser = Parser(
        "tierax lab run",
        "Serve a trace in simulated time with the scheduler, the cache and the policies of tierax serve.",
    )
    add_trace_options(parser)
    add_pace_options(parser)
    add_setup_options(parser)
    parser.add_argument(
        "--tiers",
        action="store_true",
        help="four runs, as the tiers come one by one: no cache, DEVICE, HOST, DISK",
    )
    parser.add_argument(
        "--timeline-interval",
        type=positive,
        metavar="S",
        help="seconds between two samples of the tiers in the JSON report (default: a hundredth of the trace)",
    )
    add_json_option(parser)
    args = parser.parse_args(argv)
    reports = measure(parser, args)

    from ..bench.report import write_json

    if args.json is not None:
        write_json(reports if args.tiers else reports[0], args.json)
    elif args.tiers:
        print(tiers_table(reports))
    else:
        print(_one_table(reports[0]))
    return 0


def measure(parser: Parser, args: argparse.Namespace) -> list[dict[str, Any]]:
    from dataclasses import replace

    from ..lab.simulate import simulate
    from .lab_options import progress_bar

    trace = read_trace(args)
    setup, pace = setup_of(parser, args, trace), pace_of(args)
    setups = {"": setup}
    if args.tiers:
        setups = {
            "none": replace(setup, caching=False, host_bytes=0, disk_bytes=0),
            "DEVICE": replace(setup, host_bytes=0, disk_bytes=0),
            "HOST": replace(setup, disk_bytes=0),
            "DISK": setup,
        }
    reports = []
    for name, chosen in setups.items():
        with progress_bar(name, len(trace.requests)) as progress:
            result: Result = simulate(trace, chosen, pace, interval=args.timeline_interval, progress=progress)
        named = {"name": name} if name else {}
        reports.append(named | result.as_json())
    return reports


def tiers_table(reports: list[dict[str, Any]]) -> str:
    """The source article's columns, and where the hits came from."""
    from ..bench.report import table

    header = ["", "TTFT ms", "p50", "p99", "TPOT ms", "req/s", "device KV GB", "hit rate"]
    header += ["device", "host", "disk", "busy", "$/M tokens", "relative"]
    first = reports[0]["usd_per_mtok"]
    rows = [
        [
            report["name"],
            *(f"{report[f'ttft_ms_{name}']:.0f}" for name in ("mean", "p50", "p99")),
            f"{report['tpot_ms']:.1f}",
            f"{report['req_s']:.2f}",
            f"{report['most_bytes']['device'] / 1e9:.1f}",
            f"{report['hit_rate']:.1%}",
            *(f"{share:.1%}" for share in report["hit_rate_by_tier"].values()),
            f"{report['device_busy']:.0%}",
            f"{report['usd_per_mtok']:.4f}",
            f"{100 * report['usd_per_mtok'] / first:.1f}",
        ]
        for report in reports
    ]
    return table(header, rows)


def _one_table(report: dict[str, Any]) -> str:
    from ..bench.report import table

    by_tier = ", ".join(f"{tier} {share:.1%}" for tier, share in report["hit_rate_by_tier"].items())
    parts = ", ".join(f"{name} {usd:.5f}" for name, usd in report["usd_parts"].items())
    gigabytes = {
        name: ", ".join(f"{key} {value / 1e9:.1f}" for key, value in report[name].items())
        for name in ("most_bytes", "moved_bytes")
    }
    evicted = ", ".join(f"{tier} {pages:,}" for tier, pages in report["evicted_pages"].items())
    rows = [
        ["requests (refused)", f"{report['requests']:,} ({report['refused']:,})"],
        ["tokens: prompts, output", f"{report['prompt_tokens']:,}, {report['output_tokens']:,}"],
        ["simulated seconds", f"{report['seconds']:,.1f}"],
        ["hit rate", f"{report['hit_rate']:.2%} ({by_tier})"],
        ["of the prompts' arithmetic", f"{report['compute_hit_rate']:.2%}"],
        [
            "first token, ms: mean, p50, p99",
            ", ".join(f"{report[f'ttft_ms_{name}']:,.1f}" for name in ("mean", "p50", "p99")),
        ],
        ["per later token, ms", f"{report['tpot_ms']:.2f}"],
        ["requests/s, output tokens/s", f"{report['req_s']:.3f}, {report['output_tok_s']:,.1f}"],
        ["device busy", f"{report['device_busy']:.1%}"],
        ["most GB used", gigabytes["most_bytes"]],
        ["GB moved", gigabytes["moved_bytes"]],
        ["pages evicted", evicted],
        ["$ per million tokens", f"{report['usd_per_mtok']:.5f} ({parts})"],
    ]
    return table([report["trace"], ""], rows)
