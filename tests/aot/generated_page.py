"""What the scripts share that write a page of the documentation from recorded outcomes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .results import Record, read


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (heading, ["---"] * len(heading), *rows)]


def write_or_check(page: Path, render: Callable[[Sequence[Record]], str], description: str | None) -> int:
    """Writes the page, or with `--check` compares it; the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the page is out of date"
    )
    arguments = parser.parse_args()
    text = render(read())
    if not arguments.check:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"docs/{page.name} is out of date: run python {sys.argv[0]}", file=sys.stderr)
    return 1
