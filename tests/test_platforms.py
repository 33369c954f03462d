"""docs/platforms.md and docs/slices.md say what the results say, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from aot.results import Record, read, update

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return _script("platforms_table")


@pytest.fixture(scope="module")
def slices() -> ModuleType:
    return _script("slices_table")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def _kernels(verdict: str, platform: str = "v6e", backend: str = "tpu") -> Record:
    return Record(platform, backend, "9/3x64", "kernels", 1, "bf16", "fp8", 16, verdict)


def test_the_page_is_what_the_script_makes_of_the_results(table: ModuleType) -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.render(read())


def test_a_cell_tells_the_outcome_of_its_case_alone(table: ModuleType) -> None:
    page = table.render([_kernels("compiled"), _kernels("run", "CPU", "native")])
    (row,) = (line for line in page.splitlines() if line.startswith("| 9/3x64"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    columns = [cell.strip() for cell in _heading(page, "| shape").strip("|").split("|")]
    told = dict(zip(columns, cells, strict=True))
    assert told.pop("tpu on v6e") == "compiled for"
    assert told.pop("native on CPU") == "**run**"
    assert told.pop("page") == "16"
    assert [told.pop(name) for name in ("shape", "dtype, KV")] == ["9/3x64", "bf16, fp8"]
    assert set(told.values()) == {"not tried"}


def test_what_does_not_work_is_told_with_its_reason(table: ModuleType) -> None:
    page = table.render(
        [
            _kernels("refused: needs bf16 KV"),
            _kernels("out of memory", "v5e"),
            _kernels("out of memory", "tpu7x"),
        ]
    )
    assert "refused [" in page
    assert page.count("out of memory") == 1
    assert page.count("fails [") == 2
    assert "compiled for |" not in page


def test_steps_are_told_by_backend_and_bucket(table: ModuleType) -> None:
    step = Record("H100", "mosaic-gpu", "Qwen3-8B", "decode", 1, "bf16", "bf16", 16, "compiled", 1 << 30)
    page = table.render([step, step._replace(phase="mixed"), step._replace(phase="mixed", backend="xla")])
    assert "compiled for mosaic-gpu (decode, mixed); compiled for xla (mixed)" in page
    assert "| H100 | Qwen3-8B | 1 | mosaic-gpu, decode | bf16 | 1.0 |" in page


def test_a_rerun_replaces_its_own_cases_only(tmp_path: Path) -> None:
    path = tmp_path / "tpu.jsonl"
    update(path, [_kernels("compiled"), _kernels("fails: x", "v5e")])
    update(path, [_kernels("compiled", "v5e")])
    assert [(r.platform, r.verdict) for r in read(tmp_path)] == [("v5e", "compiled"), ("v6e", "compiled")]


def _heading(page: str, start: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(start))


def test_the_page_of_slices_is_what_the_script_makes_of_the_results(slices: ModuleType) -> None:
    assert slices.PAGE.read_text(encoding="utf-8") == slices.render(read())


def test_a_slice_has_a_row_for_each_model_and_what_does_not_fit_is_told(slices: ModuleType) -> None:
    good = Record(
        "v6e:2x4", "tpu", "Big", "decode", 8, "bf16", "bf16", 16, "compiled", peak_bytes=2**30, pages=1000
    )
    bad = good._replace(phase="mixed", verdict="needs 9 bytes, and the device has 8", peak_bytes=2**31)
    few = good._replace(dtype="int8-rows")
    page = slices.render([good, bad, few, _kernels("compiled")])
    rows = [line for line in page.splitlines() if line.startswith("| Big")]
    assert len(rows) == 2
    assert rows[0].startswith("| Big | bf16 | v6e:2x4 | 8 | 0.00 | 1,000 | 16,000 | 2.00 |")
    assert "compiled (decode); mixed: needs 9 bytes" in rows[0]
    assert rows[1].startswith("| Big | int8 |")
    assert "9/3x64" not in page
