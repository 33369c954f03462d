"""What a compiler or a device made of each case: one JSON line per case, in the folder beside this file.

A rerun replaces the lines of the cases that it ran, and keeps the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "results"


class Record(NamedTuple):
    """One outcome. Bytes are of one device; 0 where they mean nothing."""

    platform: str
    """A name of `PLATFORMS`."""
    backend: str
    """The kernels, as `--attention-backend` spells them."""
    subject: str
    """A model, or for kernels alone their shape: `32/8x128` is query heads / KV heads x head_dim."""
    phase: str
    """decode or mixed: a whole step; kernels: attention and KV write alone."""
    tp: int
    dtype: str
    kv: str
    page_size: int
    verdict: str
    """`run`, `compiled`, or in words why not."""
    pool_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    """For lowering and compiling."""
    pages: int = 0
    """Of the pool."""
    weight_bytes: int = 0

    @property
    def key(self) -> tuple[str | int, ...]:
        """What a later record of the same case replaces."""
        return self[:8]


Report = Callable[[Record], None]
"""Takes an outcome; a fixture of the tests."""


def read(folder: Path = FOLDER) -> list[Record]:
    """All records, in the order of their keys."""
    lines = [
        line for path in folder.glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sorted((Record(**json.loads(line)) for line in lines), key=lambda record: record.key)


def update(path: Path, records: Iterable[Record]) -> None:
    """Puts records into one file of results."""
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    merged = {record.key: record for record in [*(Record(**json.loads(line)) for line in old), *records]}
    lines = [json.dumps(merged[key]._asdict()) + "\n" for key in sorted(merged)]
    path.write_text("".join(lines), encoding="utf-8")
