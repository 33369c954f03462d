"""Sweeps out of TOML files: the same rows in one process or two, mistakes in one line, pictures of what was found."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tierax.cli.main import main
from tierax.lab.errors import LabError
from tierax.lab.plots import plot_all
from tierax.lab.sweep import compared, read_sweep, run_sweep, runs

MOONCAKE = Path(__file__).parent / "traces" / "mooncake_conversation_1000.jsonl.zst"
OWN = """
from tierax.cache.policies.registry import EvictionPolicy

class Newest(EvictionPolicy):
    def touch(self, item, use):
        item.rank = -use.tick

    def priority(self, item):
        return item.rank
"""


def written(folder: Path, *lines: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text("\n".join([f'trace = "{MOONCAKE}"', "max_requests = 150", *lines]))
    return path


def test_processes_change_no_figure(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path}/own.py:Newest"
    sweep = read_sweep(
        written(tmp_path, "capacity_blocks = [300, 900]", f'policies = ["lru", "hazard", "{own}"]')
    )
    alone = dict(run_sweep(sweep, processes=1))
    assert dict(run_sweep(sweep, processes=2)) == alone
    rows = compared(alone[place] for place in range(len(runs(sweep))))
    assert [row["policy"] for row in rows] == ["infinite", *["lru", "hazard", own, "belady"] * 2]
    for row in rows[1:]:
        assert row["token_hit_rate"] <= rows[0]["token_hit_rate"]
    assert [row["gap_closed"] for row in rows if row["policy"] in ("lru", "belady")] == [0, 1, 0, 1]


def test_command_line_writes_table_csv_json_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "capacity_blocks = [300]", 'policies = ["lru"]')
    outputs = ["--csv", f"{tmp_path}/out.csv", "--json", f"{tmp_path}/out.json", "--plots", str(tmp_path)]
    assert main(["lab", "sweep", str(path), "--processes", "1", *outputs]) == 0
    assert main(["lab", "sweep", str(path), "--processes", "1"]) == 0
    assert "of the gap LRU - Belady" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["policy"] for row in csv.DictReader(file)] == [row["policy"] for row in rows]
    assert (tmp_path / "hit-rate.png").read_bytes().startswith(b"\x89PNG")


def test_simulated_sweep_and_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(
        tmp_path,
        "capacity_blocks = [200]",
        'policies = ["lru", "hazard"]',
        "[simulate]",
        'write_policies = ["write_through", "write_back"]',
        "host_times = 2",
    )
    report = tmp_path / "out.json"
    arguments = ["--max-requests", "8", "--processes", "1", "--json", str(report)]
    assert main(["lab", "sweep", str(path), *arguments]) == 0
    rows = json.loads(report.read_text())
    assert [(row["policy"], row["write_policy"]) for row in rows] == [
        ("lru", "write_through"),
        ("hazard", "write_through"),
        ("lru", "write_back"),
        ("hazard", "write_back"),
    ]
    assert all(row["ttft_ms_mean"] > 0 for row in rows)
    assert main(["lab", "plot", str(report), "--out", str(tmp_path / "plots"), "--suffix", "svg"]) == 0
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"first-token.svg", "cost.svg", "timeline.svg"}
    assert "first-token.svg" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["capacity_blocks = [1]"], "missing .*'policies'"),
        (["capacity_blocks = [1]", 'policies = ["lfru"]'], "unknown eviction policy 'lfru'"),
        (["capacity_blocks = [0]", 'policies = ["lru"]'], "above 0"),
        (["capacity_blocks = []", 'policies = ["lru"]'], "at least one"),
        (["capacity_blocks = 5", 'policies = ["lru"]'], "capacity_blocks = 5 is not"),
        (["capacity_blocks = [1]", 'policies = ["lru"]', "colour = 1"], "no setting colour"),
        (
            ["capacity_blocks = [1]", 'policies = ["lru"]', "[simulate]", 'device = "abacus"'],
            "abacus",
        ),
        (["capacity_blocks = "], "sweep.toml"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(LabError, match=message) as raised:
        read_sweep(written(tmp_path, *lines))
    assert "\n" not in str(raised.value)


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LabError, match="nothing in this report"):
        plot_all([{"trace": "a"}], tmp_path)
    (tmp_path / "bad.json").write_text("3")
    assert main(["lab", "plot", str(tmp_path / "bad.json")]) == 2
    assert "no report of the lab" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "lab" / "sweeps").glob("*.toml")))
def test_committed_sweeps_can_be_read(path: Path) -> None:
    sweep = read_sweep(path)
    assert Path(sweep.trace).is_file()
    assert len(runs(sweep)) > 4
