"""scripts/device_check.py on this machine's CPU: its report, and that it notices what is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from tierax.pallas_kernels import xla
from tierax.pallas_kernels.kernels import AttentionShape, Kernels, Target

SCRIPT = Path(__file__).parents[1] / "scripts" / "device_check.py"
F32 = AttentionShape(4, 2, 16, 4, "f32", "f32")
ROWS = [(5, 9), (1, 0), (1, 20)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["device_check"] = module
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["device_check.py", *arguments])
    return script.main()


@pytest.mark.slow
def test_the_report_on_a_cpu(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "report.json"
    assert run(script, monkeypatch, "--quick", "--backends", "triton,xla", "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert report["platform"] == "cpu"
    assert report["complete"]
    assert report["bytes_s"] > 0
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        rows.setdefault(row["by"], []).append(row)
    assert [row["note"] for row in rows["triton"]] == ["refused: needs an NVIDIA GPU"]
    assert [row["check"] for row in rows["xla"]] == ["values", "values", "decode", "prefill"]
    assert all(0 < row["error"] < 3e-5 for row in rows["xla"][:2])
    for row in (*rows["xla"][2:], *rows["jax: gather + XLA"]):
        assert row["ms"] > 0
        assert row["bound_ms"] > 0
    text = capsys.readouterr().out
    for row in report["rows"]:
        assert row["case"] in text
    assert "complete" in text


def test_a_budget_that_is_spent_ends_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, "--quick", "--backends", "triton", "--budget", "0", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["complete"]
    assert len(report["rows"]) == 1


def test_an_unknown_backend_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(script, monkeypatch, "--backends", "xla,cuda")
    assert "unknown backend 'cuda': choose from" in capsys.readouterr().err


def test_wrong_values_are_noticed(script: ModuleType) -> None:
    def off_by_one(*arguments: Any, window: jax.Array, **options: Any) -> jax.Array:
        return xla.attend(*arguments, window=window + 1, **options)

    mixed = script.Mixed(F32, ROWS, window=7, soft_cap=30.0)
    right = xla.kernels(Target("cpu"), F32)
    assert 0 < script.check_values(mixed, right) < script.LARGEST_ERROR["f32"]
    assert script.check_values(mixed, right._replace(attend=off_by_one)) > 1e-2


def test_a_kernel_that_reads_beyond_its_row_is_noticed(script: ModuleType) -> None:
    def beyond(q: Any, pool: Any, layer: Any, batch: Any, **options: Any) -> jax.Array:
        return xla.attend(q, pool, layer, batch._replace(kv_lens=batch.kv_lens + 1), **options)

    right = xla.kernels(Target("cpu"), F32)
    assert not script.check_values(script.Mixed(F32, ROWS), right._replace(attend=beyond)) < 1


def test_what_fails_is_told_and_fails(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Kernels:
        raise RuntimeError("out of shared memory\nand more")

    monkeypatch.setattr(script, "check_values", broken)
    row = next(script.all_values(Target("cpu"), ["xla"], True))
    assert (row.failed, row.note) == (True, "FAILED: out of shared memory")
