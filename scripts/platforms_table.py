"""Writes docs/platforms.md from the outcomes in tests/aot/results; with `--check` says whether the page is up to date."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from aot.generated_page import table, write_or_check  # noqa: E402
from aot.results import Record  # noqa: E402

PAGE = ROOT / "docs" / "platforms.md"
PLATFORMS = ("v5e", "v5p", "v6e", "tpu7x", "A100", "H100", "CPU")
KERNELS = (
    *(("tpu", name) for name in ("v5e", "v5p", "v6e", "tpu7x")),
    ("mosaic-gpu", "H100"),
    ("triton", "H100"),
    ("triton", "A100"),
    ("native", "CPU"),
    ("xla", "CPU"),
)
"""Backend and platform of each column of the kernels' table."""
NOT_TRIED = "not tried"

INTRODUCTION = """\
# Platforms

What each kernel was tried on. This page is written by `scripts/platforms_table.py` from `tests/aot/results`, which the
tests in `tests/aot` write; a test compares the two.

- **run**: executed on such a device, and compared with reference values (`make test-cpu-kernels`).
- **compiled for**: compiled ahead of time for that device by its own compiler, without one at hand (`make test-tpu-aot`,
  `make test-gpu-aot`). It fits the device's memories, the KV pool is updated in place, and there is no temporary of the
  pool's size. That says nothing about values or speed there; values are tested in interpreters (`tests/pallas_kernels`).
- **refused**: the backend says at start that it does not serve the shape, and the next one serves.
- **not tried**: nothing is claimed.
"""


class Notes:
    """Numbered remarks under a table; equal ones share a number."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self._texts:
            self._texts.append(text)
        return f"[{self._texts.index(text) + 1}]"

    def lines(self) -> list[str]:
        return [f"{number}. {text}" for number, text in enumerate(self._texts, start=1)]


def render(records: Sequence[Record]) -> str:
    """The page. Of whole slices docs/slices.md tells."""
    records = [record for record in records if record.platform in PLATFORMS]
    steps = [record for record in records if record.phase != "kernels"]
    kernels = [record for record in records if record.phase == "kernels"]
    sections = [INTRODUCTION, *_steps(steps), *_memory(steps), *_kernels(kernels)]
    return "\n".join(sections).rstrip("\n") + "\n"


def _steps(records: Sequence[Record]) -> list[str]:
    notes = Notes()
    rows = []
    for model, tp, dtype, kv in sorted({(r.subject, r.tp, r.dtype, r.kv) for r in records}):
        cells = []
        for platform in PLATFORMS:
            here = [r for r in records if (r.platform, *_case(r)) == (platform, model, tp, dtype, kv)]
            cells.append(_by_backend(here, notes))
        rows.append([model, str(tp), f"{dtype}, {kv}", *cells])
    return [
        "## Whole steps\n",
        "Forward and logits of one step. In brackets: the token buckets, decode = 64 tokens, mixed = 2,048.\n",
        *table(["model", "devices", "dtype, KV", *PLATFORMS], rows),
        "",
        *notes.lines(),
    ]


def _case(record: Record) -> tuple[str, int, str, str]:
    return record.subject, record.tp, record.dtype, record.kv


def _by_backend(records: Sequence[Record], notes: Notes) -> str:
    """One cell: what became of each backend, and for which buckets."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for record in records:
        outcomes.setdefault((_verdict(record, notes), record.backend), []).append(record.phase)
    told = [
        f"{verdict} {backend} ({', '.join(sorted(set(phases)))})"
        for (verdict, backend), phases in outcomes.items()
    ]
    return "; ".join(told) or NOT_TRIED


def _verdict(record: Record, notes: Notes) -> str:
    match record.verdict.partition(": "):
        case ("run" as word, _, _):
            return f"**{word}**"
        case ("compiled", _, _):
            return "compiled for"
        case ("refused" as word, _, reason):
            return f"{word} {notes.mark(reason)}"
        case _:
            return f"fails {notes.mark(record.verdict)}"


def _memory(records: Sequence[Record]) -> list[str]:
    rows = [
        [
            record.platform,
            record.subject,
            str(record.tp),
            f"{record.backend}, {record.phase}",
            record.kv,
            f"{record.pool_bytes / 2**30:.1f}",
            f"{record.temp_bytes / 2**20:.1f}",
            f"{record.peak_bytes / 2**30:.1f}",
        ]
        for record in records
        if record.verdict == "compiled"
    ]
    heading = [
        "platform",
        "model",
        "devices",
        "kernels, bucket",
        "KV",
        "pool, GiB",
        "temporaries, MiB",
        "all, GiB",
    ]
    return [
        "\n## Memory of whole steps\n",
        "Of one device, as its compiler states it; the pool has 85 % of what the weights leave.\n",
        *table(heading, rows),
    ]


def _kernels(records: Sequence[Record]) -> list[str]:
    notes = Notes()
    outcomes = {
        (r.subject, r.page_size, r.dtype, r.kv, r.backend, r.platform): _verdict(r, notes) for r in records
    }
    shapes = sorted({key[:4] for key in outcomes}, key=lambda key: (_numbers(key[0]), key[1:]))
    rows = [
        [
            subject,
            str(page_size),
            f"{dtype}, {kv}",
            *(
                outcomes.get((subject, page_size, dtype, kv, backend, platform), NOT_TRIED)
                for backend, platform in KERNELS
            ),
        ]
        for subject, page_size, dtype, kv in shapes
    ]
    columns = [f"{backend} on {platform}" for backend, platform in KERNELS]
    return [
        "\n## Kernels\n",
        "KV write and attention of one layer. Shapes are query heads / KV heads x head_dim.\n",
        *table(["shape", "page", "dtype, KV", *columns], rows),
        "",
        *notes.lines(),
    ]


def _numbers(shape: str) -> list[int]:
    return [int(number) for number in shape.replace("x", "/").split("/")][::-1]


def main() -> int:
    return write_or_check(PAGE, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())
