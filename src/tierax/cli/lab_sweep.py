"""`tierax lab sweep`: policies by capacities, out of a TOML file, in processes beside each other."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

from .lab_options import add_json_option, count
from .option import Parser


def run(argv: list[str]) -> int:
    parser = Parser("tierax lab sweep", "Run every combination that a TOML file describes over one trace.")
    parser.add_argument("sweep", type=Path, metavar="FILE.toml", help="what is varied, and on which trace")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in place of the file's trace")
    parser.add_argument(
        "--max-requests", type=count, metavar="N", help="only the first N requests of the trace"
    )
    parser.add_argument(
        "--processes", type=count, metavar="N", help="runs at a time (default: one for each core)"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the figures as CSV too")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write pictures into this folder too")
    add_json_option(parser)
    args = parser.parse_args(argv)
    rows = measure(args)

    from ..bench.report import write_json

    if args.csv is not None:
        _write_csv(rows, args.csv)
    if args.plots is not None:
        from ..lab.plots import plot_all

        plot_all(rows, args.plots)
    if args.json is not None:
        write_json(rows, args.json)
    else:
        print(_table(rows))
    return 0


def measure(args: Any) -> list[dict[str, Any]]:
    from dataclasses import replace

    from tqdm import tqdm

    from ..lab.sweep import compared, read_sweep, run_sweep, runs

    sweep = read_sweep(args.sweep)
    if args.trace is not None:
        sweep = replace(sweep, trace=str(args.trace))
    if args.max_requests is not None:
        sweep = replace(sweep, max_requests=args.max_requests)
    total = len(runs(sweep))
    rows: dict[int, dict[str, Any]] = {}
    with tqdm(total=total, unit="run", disable=not sys.stderr.isatty()) as bar:
        for place, row in run_sweep(sweep, args.processes or os.cpu_count() or 1):
            rows[place] = row
            bar.update()
    return compared(rows[place] for place in range(total))


def _write_csv(rows: list[dict[str, Any]], path: str) -> None:
    """The figures that are single numbers or names."""
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if not any(isinstance(row.get(name), (list, dict)) for row in rows)
    ]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _table(rows: list[dict[str, Any]]) -> str:
    from ..bench.report import table

    if "ttft_ms_mean" in rows[0]:
        header = [
            "policy",
            "blocks",
            "write",
            "prefetch",
            "hit rate",
            "over LRU",
            "TTFT ms",
            "over LRU",
            "p99",
            "req/s",
            "$/M tokens",
        ]
        return table(header, [_simulated(row) for row in rows])
    cells = [
        [
            row["policy"],
            "" if row["capacity_blocks"] is None else f"{row['capacity_blocks']:,}",
            f"{row['token_hit_rate']:.2%}",
            _points(row),
            "" if row.get("gap_closed") is None else f"{row['gap_closed']:.0%}",
        ]
        for row in rows
    ]
    return table(["policy", "blocks", "token hit rate", "over LRU", "of the gap LRU - Belady"], cells)


def _simulated(row: dict[str, Any]) -> list[str]:
    return [
        row["policy"],
        f"{row['capacity_blocks']:,}",
        row["write_policy"],
        row["prefetch_policy"],
        f"{row['hit_rate']:.2%}",
        _points(row),
        f"{row['ttft_ms_mean']:,.0f}",
        "" if row.get("ttft_over_lru") is None else f"{row['ttft_over_lru']:+.1%}",
        f"{row['ttft_ms_p99']:,.0f}",
        f"{row['req_s']:.2f}",
        f"{row['usd_per_mtok']:.4f}",
    ]


def _points(row: dict[str, Any]) -> str:
    return "" if row.get("hits_over_lru") is None else f"{100 * row['hits_over_lru']:+.2f} points"
