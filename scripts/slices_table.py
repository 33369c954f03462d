"""Writes docs/slices.md from the outcomes in tests/aot/results; with `--check` says whether the page is up to date."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from aot.generated_page import table, write_or_check  # noqa: E402
from aot.results import Record  # noqa: E402

PAGE = ROOT / "docs" / "slices.md"

INTRODUCTION = """\
# Which model fits which slice

Whole steps (forward and logits) of models that are split over all chips of a TPU slice, compiled ahead of time by the
TPU's own compiler, without a TPU at hand (`make test-tpu-aot`): no figure here says anything about speed, and nothing was run. Each step
fits the memory of a chip, and updates its KV pool in place. This page is written by `scripts/slices_table.py` from
`tests/aot/results/tpu_slices.jsonl`.

- **tokens of KV** is what the whole slice keeps on its devices (L1): all chips hold the same tokens, each for its KV heads. A page
  has 16 tokens, and the pool 85 % of what weights leave; host and disk come on top.
- **weights** in bf16 are what a checkpoint has; the others are `--quantization int8` and `fp8` ([models](models.md)).
- Experts are split whole, each on one chip; the router is on all of them. With more chips than KV heads, several hold the same head:
  Qwen3-30B-A3B has 4, so its KV takes twice the memory on 8 chips.
"""
WEIGHTS = {"int8-rows": "int8"}


def render(records: Sequence[Record]) -> str:
    """The page, of records whose platform is a slice, as `v6e:2x4`."""
    cases = sorted({_case(record) for record in records if ":" in record.platform})
    rows = [_row([record for record in records if _case(record) == case]) for case in cases]
    heading = [
        "model",
        "weights",
        "slice",
        "chips",
        "weights per chip, GiB",
        "pages",
        "tokens of KV",
        "all of a chip, GiB",
        "temporaries, MiB",
        "outcome",
    ]
    return "\n".join([INTRODUCTION, *table(heading, rows)]) + "\n"


def _case(record: Record) -> tuple[str, str, str]:
    return record.subject, record.dtype, record.platform


def _row(same: Sequence[Record]) -> list[str]:
    """Of one model on one slice; what differs between the buckets is that of the largest."""
    first = same[0]
    good = [record for record in same if record.verdict == "compiled"]
    verdicts = [f"{r.phase}: {r.verdict}" for r in same if r not in good]
    if good:
        verdicts.insert(0, f"compiled ({', '.join(sorted(record.phase for record in good))})")
    return [
        first.subject,
        WEIGHTS.get(first.dtype, first.dtype),
        first.platform,
        str(first.tp),
        f"{first.weight_bytes / 2**30:.2f}",
        f"{first.pages:,}",
        f"{first.pages * first.page_size:,}",
        f"{max(record.peak_bytes for record in same) / 2**30:.2f}",
        f"{max(record.temp_bytes for record in same) / 2**20:.1f}",
        "; ".join(verdicts),
    ]


def main() -> int:
    return write_or_check(PAGE, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())
