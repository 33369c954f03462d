"""`tierax lab plot`: pictures of a report that `lab sweep`, `lab run` or `lab oracle` wrote as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from .option import Parser


def run(argv: list[str]) -> int:
    parser = Parser("tierax lab plot", "Draw what a JSON report of the lab has figures for.")
    parser.add_argument("report", type=Path, metavar="FILE.json", help="written with --json")
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="default: the working directory"
    )
    parser.add_argument("--suffix", choices=("png", "svg", "pdf"), default="png")
    args = parser.parse_args(argv)
    try:
        report = json.loads(args.report.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"{args.report}: {error}")
    rows = report if isinstance(report, list) else [report]
    if not rows or not all(isinstance(row, dict) for row in rows):
        parser.error(f"{args.report}: no report of the lab")

    from ..lab.plots import plot_all

    for row in rows:
        row.setdefault("trace", args.report.stem)
    for path in plot_all(rows, args.out, args.suffix):
        print(path)
    return 0
