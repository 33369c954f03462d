"""Figures as one table for people, or as JSON for scripts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import pictures
from .pictures import Panel
from .runs import machine


class Parser(argparse.ArgumentParser):
    """Of one benchmark; a mistake is one line and exit code 2, without the usage block."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def add_outputs(self, picture: str) -> None:
        """The two forms of the figures beside the table. `picture` says what `--plot` draws."""
        self.add_argument("--plot", type=_picture, metavar="FILE", help=f"draw {picture} (.svg, .png, .pdf)")
        self.add_argument(
            "--json", metavar="FILE", help="write the figures as JSON; - is the standard output"
        )

    def draw(self, path: Path | None, *panels: Panel) -> None:
        """What `--plot` has asked for, if it has; last of all, as it may fail and figures take long."""
        if path is None:
            return
        if not panels:
            self.error("--plot: nothing of it was measured")
        try:
            pictures.save(path, *panels)
        except OSError as error:
            self.error(f"--plot: {error}")


def _picture(text: str) -> Path:
    """Mistakes show before minutes of measuring."""
    if Path(text).suffix not in pictures.SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(pictures.SUFFIXES)}")
    if not pictures.can_draw():
        raise argparse.ArgumentTypeError(pictures.MISSING)
    return Path(text)


def write_json(report: Any, target: str) -> None:
    """Writes to a file, or to stdout for `-`."""
    text = json.dumps(report, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    with open(target, "w", encoding="utf-8") as file:
        file.write(text)


def write_report(report: dict[str, Any], target: str) -> None:
    """A benchmark's figures, and the machine that they are of, beside what the benchmark has found out about it."""
    write_json({**report, "machine": machine() | report.get("machine", {})}, target)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in [header, *rows]
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join(line.rstrip() for line in [lines[0], rule, *lines[1:]])


def number(value: float) -> str:
    """Three or more significant digits: `41.3`, `0.57`, `1234`."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
