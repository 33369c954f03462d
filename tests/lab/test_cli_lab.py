"""`tierax lab …`: the names that scripts rely on, tables for people, and one line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tierax.cli.main import main

HERE = Path(__file__).parent / "traces"
MOONCAKE = str(HERE / "mooncake_conversation_1000.jsonl.zst")
SRC = Path(__file__).parents[2] / "src"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Stdout of a call that succeeds."""
    assert main(["lab", *args]) == 0
    return capsys.readouterr().out


def test_oracle_prints_rows_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--capacity-blocks", "200,1000", "--policies", "lru,fifo,belady", "--max-requests", "200"]
    rows = json.loads(run(capsys, "oracle", "--trace", MOONCAKE, *flags, "--json", "-"))
    found = {(row["policy"], row["capacity_blocks"]): row["token_hit_rate"] for row in rows}
    assert len(rows) == 7
    assert set(found) == {("infinite", None)} | {(p, c) for p in ("lru", "fifo", "belady") for c in (200, 1000)}  # fmt: skip
    assert found["lru", 200] <= found["belady", 200] <= found["infinite", None]
    table = run(capsys, "oracle", "--trace", MOONCAKE, *flags)
    assert "100%" in table
    assert len(table.splitlines()) == 9


def test_run_reports_every_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--trace", MOONCAKE, "--max-requests", "15", "--host-cache-size", "2x", "--disk-cache-size", "50GB"]  # fmt: skip
    flags += ["--device-cache-size", "10GB"]
    path = tmp_path / "run.json"
    assert run(capsys, "run", *flags, "--json", str(path)) == ""
    report = json.loads(path.read_text())
    assert report["requests"] + report["refused"] == 15
    for name in ("hit_rate", "compute_hit_rate", "ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms"):
        assert report[name] >= 0
    assert set(report["hit_rate_by_tier"]) == {"device", "host", "disk"}
    assert set(report["usd_parts"]) == {"accelerator", "dram", "ssd", "io"}
    assert len(report["ttft_ms_percentiles"]) == 101
    assert report["timeline"][-1]["used_bytes"]["host"] > 0
    assert "hit rate" in run(capsys, "run", *flags)


def test_the_tiers_come_one_by_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = str(tmp_path / "chat.jsonl")
    made = json.loads(
        run(
            capsys,
            "workload",
            "--out",
            trace,
            "--sessions",
            "6",
            "--answer-tokens",
            "40",
            "--seed",
            "3",
            "--json",
            "-",
        )
    )
    assert made["sessions"] == 6
    flags = ["--trace", trace, "--users", "3", "--tiers", "--device-cache-size", "3GB"]
    flags += ["--host-cache-size", "20GB", "--disk-cache-size", "100GB", "--max-requests", "12"]
    rows = json.loads(run(capsys, "run", *flags, "--json", "-"))
    assert [row["name"] for row in rows] == ["none", "DEVICE", "HOST", "DISK"]
    rates = [row["hit_rate"] for row in rows]
    assert rates[0] == 0 < rates[1] <= rates[2]
    assert "relative" in run(capsys, "run", *flags)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["orakel"], "no part 'orakel'; did you mean oracle?"),
        (["oracle"], "required: --trace"),
        (["oracle", "--trace", "/no/such"], "tierax lab: error: /no/such: No such file"),
        (["oracle", "--trace", MOONCAKE, "--policies", "clairvoyant"], "unknown eviction policy"),
        (["oracle", "--trace", MOONCAKE, "--capacity-blocks", "0"], "above 0"),
        (["oracle", "--trace", str(SRC.parent / "README.md")], "no format that is known"),
        (["oracle", "--trace", MOONCAKE, "--format", "azur"], "no format 'azur'"),
        (["run", "--trace", MOONCAKE, "--device", "abacus"], "no device 'abacus'"),
        (["run", "--trace", MOONCAKE, "--model", "gpt-9"], "no model 'gpt-9'"),
        (["run", "--trace", MOONCAKE, "--host-cache-size", "much"], "is not a size"),
        (["run", "--trace", MOONCAKE, "--eviction-policy", "oldest"], "unknown eviction policy"),
        (["run", "--trace", MOONCAKE, "--write-policy", "never"], "no policy 'never'"),
        (["run", "--trace", MOONCAKE, "--prefetch-policy", "soon"], "must be best_effort"),
        (["run", "--trace", MOONCAKE, "--model", "llama-3.1-70b"], "no room for a page"),
        (["run", "--trace", MOONCAKE, "--calibration", "/no/such"], "No such file"),
        (["workload", "--out", "/no/such/file"], "error: /no/such/file: No such file"),
        (["workload", "--out", "x", "--turns", "0.5"], "at least one"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], args: list[str], problem: str) -> None:
    assert main(["lab", *args]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("tierax lab")
    assert problem in error


def test_help_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--help")
    assert all(name in text for name in ("run", "oracle", "compare", "workload"))
    assert main(["lab"]) == 2


def test_the_lab_never_loads_jax() -> None:
    code = (
        "import sys, tierax.lab.simulate, tierax.lab.oracle, tierax.lab.calibration, tierax.lab.workload;"
        "sys.exit('jax' in sys.modules or 'tensorstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, check=False).returncode == 0  # fmt: skip
