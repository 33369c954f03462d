"""The radix benchmark: its workload is reproducible, its hit rate exact, its output as documented."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from tierax.bench.radix import Workload, conversation_stream, main, measure


def test_stream_is_reproducible_and_every_conversation_grows() -> None:
    workload = Workload(conversations=7, systems=2, system_tokens=10, turns=3, user_tokens=4, answer_tokens=5)
    requests = list(conversation_stream(workload))
    assert requests == list(conversation_stream(workload))
    lengths = [len(prompt) for prompt, _ in requests]
    assert {length: lengths.count(length) for length in lengths} == {14: 7, 23: 7, 32: 7}
    assert all(full[: len(prompt)] == prompt and len(full) == len(prompt) + 5 for prompt, full in requests)


@pytest.mark.parametrize("page_size", [1, 4])
def test_measured_hit_rate_with_room_for_all(page_size: int) -> None:
    workload = Workload(
        conversations=4, systems=1, system_tokens=16, turns=2, user_tokens=8, answer_tokens=8, concurrent=1
    )
    ticks = count()
    result = measure(list(conversation_stream(workload)), page_size, 10_000, lambda: float(next(ticks)))
    # Prompts of 24 and 40 tokens; the second turn hits 32, the first the system prompt but for the very first.
    assert result.hit_rate == pytest.approx((3 * 16 + 4 * 32) / (4 * 64))
    assert result.requests == 8
    assert result.requests_s == pytest.approx(8 / (8 * 5 + 1))
    assert result.match_us == 1e6
    assert result.evicted_pages == 0


def test_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["--conversations", "3", "--repeats", "1", "--capacity-tokens", "4096"]
    assert main(small) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["page", "requests/s"]
    assert [row.split()[0] for row in rows] == ["1", "16"]
    assert main([*small, "--page-size", "8", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["page_size"] for row in report["results"]] == [8]
    assert report["results"][0]["requests"] == 18
    assert "processor" in report["machine"]
    assert main([*small, "--json", str(tmp_path / "out.json")]) == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["results"]) == 2
    assert capsys.readouterr().out == ""


def test_several_runs_give_a_median_between_the_least_and_the_most(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "radix.svg"
    small = ["--conversations", "3", "--repeats", "4", "--page-size", "8", "--plot", str(picture)]
    assert main([*small, "--seed", "9", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["workload"]["seed"] == 9
    (row,) = report["results"]
    least, most = row["spread"]["requests_s"]
    assert least <= row["requests_s"] <= most
    assert row["page_size"] == 8
    assert "pages of 8" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "0"], "every number must be at least 1"),
        (["--plot", "speed.jpeg"], "'speed.jpeg' must end in .svg, .png, .pdf"),
        (
            ["--conversations", "1", "--capacity-tokens", "600"],
            "a request of 640 tokens does not fit into 600",
        ),
    ],
)
def test_impossible_settings_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
