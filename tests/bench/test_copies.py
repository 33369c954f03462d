"""The measurement of copies: four paths, each beside what the machine does without us."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest

from tierax.bench.copies import measure_copies


def test_four_paths_beside_plain_ones(tmp_path: Path) -> None:
    rows = measure_copies(65_536, clock=perf_counter, directory=tmp_path, pages=12, repeats=2)
    assert [row["path"] for row in rows] == [
        "device->host",
        "host->device",
        "disk->host cold",
        "disk->host warm",
    ]
    for row, plain in zip(rows, ["memcpy", "memcpy", "pread", "pread"], strict=True):
        assert row["gb_s"] > 0
        assert row["ratio"] == pytest.approx(row["gb_s"] / row[f"{plain}_gb_s"])
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
