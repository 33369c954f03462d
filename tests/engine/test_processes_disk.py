"""Several processes with a disk tier: what they wrote any number of processes reads, and a fault of one costs hits only."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.split_engine import PAGE, PROMPTS, Place, answers
from helpers.split_team import Team
from tierax.cache.disk.store import PageStore
from tierax.cache.disk.upkeep import check_pages

pytestmark = pytest.mark.slow


def alone(directory: Path, *, disk: bool = True) -> dict[str, Any]:
    with Place(directory, "llama-bias", "f32").engine(1, disk=disk) as llm:
        return answers(llm, sampled=True)


def together(directory: Path, processes: int = 2, each: int = 2) -> dict[str, Any]:
    with Team(directory, "disk", processes, each) as team:
        found = team.answers()
        assert [process.wait(60) for process in team.processes] == [0] * processes
        return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["errors"] == []
    for name in ("greedy", "again", "sampled"):
        assert found[name] == expected[name]


def from_disk(found: dict[str, Any]) -> int:
    return sum(tiers["disk"] for tiers in found["by_tier"])


def files(directory: Path, pattern: str) -> list[Path]:
    return sorted((directory / "disk").glob(f"v1/*/*/{pattern}"))


def all_good(directory: Path) -> int:
    store = PageStore(directory / "disk", read_only=True)
    pages = [page.key for page in store.list()]
    assert [reason for _, _, reason in check_pages(store, pages)] == [None] * len(pages)
    store.close()
    return len(pages)


def test_two_processes_write_and_they_and_one_read(tmp_path: Path) -> None:
    expected = alone(tmp_path, disk=False)
    cold = together(tmp_path)
    same(cold, expected)
    assert (from_disk(cold), cold["failed_writes"]) == (0, {})
    assert all_good(tmp_path) == cold["written"] > 0
    parts = files(tmp_path, "*.2-4")
    assert len(parts) == cold["written"]

    warm = together(tmp_path)
    same(warm, expected)
    hits = from_disk(warm)
    assert (warm["written"], warm["failed_reads"]) == (0, {})
    assert hits > 150
    # One process, and eight devices of two processes: heads are on two devices each.
    for found in (alone(tmp_path), together(tmp_path, each=4)):
        same(found, expected)
        assert (from_disk(found), found["written"], found["failed_reads"]) == (hits, 0, {})

    # Process 1 cannot read its part of two pages, the first ones of two prompts: nobody has them, and all go on alike.
    lost, spoilt, *_ = files(tmp_path, "*.0.2-4")
    lost.unlink()
    raw = bytearray(spoilt.read_bytes())
    raw[5000] ^= 1
    spoilt.write_bytes(raw)
    hurt = together(tmp_path)
    same(hurt, expected)
    assert hurt["failed_reads"] == {"missing": 1, "corrupt": 1}
    # Whatever hangs below them has gone as well, and was written again.
    assert hurt["written"] >= 2
    assert all_good(tmp_path) == cold["written"]


def test_the_first_request_after_a_start_is_not_met_by_a_process_that_is_still_busy(tmp_path: Path) -> None:
    cold = together(tmp_path)
    with Team(tmp_path, "disk-late") as team:
        found = team.answers()
    same(found, cold)
    assert found["by_tier"][0]["disk"] == len(PROMPTS[0]) // PAGE * PAGE


def test_one_process_writes_and_any_number_reads(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    assert expected["written"] > 0
    assert not files(tmp_path, "*-*")
    for processes, each in ((2, 2), (4, 1)):
        found = together(tmp_path, processes, each)
        same(found, expected)
        assert from_disk(found) > 150
        assert (found["written"], found["failed_reads"]) == (0, {})
    # What four have written two read.
    shutil.rmtree(tmp_path / "disk")
    cold = together(tmp_path, 4, 1)
    assert len(files(tmp_path, "*-*")) == 3 * cold["written"]
    found = together(tmp_path)
    same(found, expected)
    assert from_disk(found) > 150
    assert (found["written"], found["failed_reads"]) == (0, {})


@pytest.mark.parametrize("killed", [0, 1])
def test_after_a_process_was_killed_there_is_no_half_of_a_page(tmp_path: Path, killed: int) -> None:
    with Team(tmp_path, "disk-forever") as team:
        expected = team.answers()
        team.processes[killed].send_signal(signal.SIGKILL)
        assert team.processes[1 - killed].wait(30) != 0
    all_good(tmp_path)
    # What a write that was cut short may have left.
    page = files(tmp_path, "*.2-4")[0]
    torn = page.with_name("00" + page.name[2:])
    torn.parent.with_name("00").mkdir(exist_ok=True)
    torn = torn.parent.with_name("00") / torn.name
    torn.write_bytes(page.read_bytes())
    found = together(tmp_path)
    same(found, expected)
    assert from_disk(found) > 150
    assert not torn.exists()
    assert found["failed_reads"] == {}


def test_processes_with_different_directories_do_not_start(tmp_path: Path) -> None:
    with Team(tmp_path, "elsewhere") as team:
        assert team.processes[0].wait(120) != 0
        _, errors = team.processes[0].communicate()
        assert "is not where process 0 writes" in errors
        assert "(process 1 of 2)" in errors
        team.processes[1].wait(30)
