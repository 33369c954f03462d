"""`tierax cache` on a directory: what it prints, what it deletes, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.disk_pages import LAYOUT, NAMESPACE, OTHER_NAMESPACE, file_of, fill, sequence
from tierax.cache.disk.board import Board
from tierax.cache.disk.fleet import Orders
from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.notes import NOBODY, Claim, Note
from tierax.cache.disk.store import PageStore
from tierax.cache.policies.policy import Use
from tierax.cli.main import main

MINE, THEIRS = sequence(6, b"mine"), sequence(3, b"theirs", OTHER_NAMESPACE)
SIZE = LAYOUT.record_bytes


@pytest.fixture
def cache(tmp_path: Path) -> PageStore:
    store = PageStore(tmp_path / "cache")
    fill(store, [*MINE, *THEIRS])
    store.papers.describe(NAMESPACE, {"model": "tiny", "kv_dtype": "float32"})
    assert store.local is not None
    (store.local / "v1" / NAMESPACE.hex() / "notes.txt").write_text("not ours")
    return store


def _json(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert main(["cache", *args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def _left(store: PageStore) -> set[Any]:
    return {page.key for page in store.list()}


def test_stat_counts(cache: PageStore, capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, "stat", str(cache.local))
    free = report.pop("free_bytes")
    assert free > 0
    assert report == {
        "location": str(cache.local),
        "namespaces": 2,
        "pages": 9,
        "bytes": 9 * SIZE,
        "orphans": 0,
        "replicas": [],
        "collector": "",
        "doomed": 0,
    }
    assert main(["cache", "stat", str(cache.local)]) == 0
    assert "9 pages in 2 namespaces, 63.0 KiB" in capsys.readouterr().out


def test_ls_tells_namespaces_apart(cache: PageStore, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["namespace"]: row for row in _json(capsys, "ls", str(cache.local))}
    assert rows[NAMESPACE.hex()] == {
        "namespace": NAMESPACE.hex(),
        "description": {"model": "tiny", "kv_dtype": "float32"},
        "pages": 6,
        "bytes": 6 * SIZE,
        "deepest": 6,
    }
    assert (rows[OTHER_NAMESPACE.hex()]["pages"], rows[OTHER_NAMESPACE.hex()]["description"]) == (3, {})
    assert main(["cache", "ls", str(cache.local)]) == 0
    text = capsys.readouterr().out
    assert "model tiny, kv_dtype float32" in text
    assert "no description" in text


def test_verify_is_quiet_about_a_sound_cache(cache: PageStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert _json(capsys, "verify", str(cache.local)) == {"pages": 9, "bad": [], "orphans": 0, "deleted": 0}


def test_verify_finds_bad_pages_and_deletes_them_on_demand(
    cache: PageStore, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = file_of(cache, MINE[3])
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    file_of(cache, THEIRS[1]).unlink()
    before = _left(cache)
    report = _json(capsys, "verify", str(cache.local), code=1)
    assert [entry["key"] for entry in report["bad"]] == [MINE[3].key.hex()]
    assert report["bad"][0]["reason"].startswith("checksum")
    assert (report["orphans"], report["deleted"]) == (1, 0)
    assert _left(cache) == before
    assert main(["cache", "verify", str(cache.local), "--delete"]) == 1
    text = capsys.readouterr().out
    assert MINE[3].key.hex() in text
    assert "8 pages: 1 bad, 1 without the pages before them, 4 deleted" in text
    assert _left(cache) == {*MINE[:3], THEIRS[0]}
    assert main(["cache", "verify", str(cache.local)]) == 0


def test_prune_deletes_what_was_used_longest_ago_tails_first(
    cache: PageStore, capsys: pytest.CaptureFixture[str]
) -> None:
    index = DiskIndex(None)
    index.add_listed(cache.list())
    index.touch(MINE, Use(1, 0.0))
    index.touch(THEIRS, Use(2, 0.0))
    cache.papers.save_index(index.snapshot())
    report = _json(capsys, "prune", str(cache.local), "--size", str(5 * SIZE))
    assert report == {"deleted": 4, "failed": 0, "bytes_left": 5 * SIZE}
    assert _left(cache) == {*MINE[:2], *THEIRS}
    assert main(["cache", "prune", str(cache.local), "--size", "1GiB"]) == 0
    assert "0 pages deleted" in capsys.readouterr().out


def test_what_servers_use_stays(cache: PageStore, capsys: pytest.CaptureFixture[str]) -> None:
    board = Board(cache, lease=10, clock=lambda: 0.0)
    note = Note(b"12345678", 1, NOBODY, 0, SIZE, frozenset(MINE[:4]))
    claim = Claim(b"12345678", 1, 1, tuple(THEIRS[2:]))
    board.carry_out(Orders(note, claim, (), ()), board.read().generation)
    place = str(cache.local)
    report = _json(capsys, "stat", place)
    assert report["replicas"] == [{"replica": b"12345678".hex(), "pages": 4}]
    assert (report["collector"], report["doomed"]) == (b"12345678".hex(), 1)
    assert main(["cache", "stat", place]) == 0
    assert "shared by 1 server (" in capsys.readouterr().out
    # A page whose head may be on its way is not for others to delete, nor is what hangs below a bad page.
    file_of(cache, THEIRS[0]).unlink()
    bad = file_of(cache, MINE[4])
    bad.write_bytes(b"bad")
    assert main(["cache", "verify", place, "--delete"]) == 1
    assert _left(cache) == {*MINE[:4], MINE[5], *THEIRS[1:]}
    assert main(["cache", "prune", place, "--size", "0"]) == 0
    assert "4 pages that servers use stay" in capsys.readouterr().err
    assert _left(cache) == {*MINE[:4], MINE[5], *THEIRS[1:]}
    assert main(["cache", "clear", place]) == 0
    assert _left(cache) == set()
    capsys.readouterr()
    assert _json(capsys, "stat", place)["replicas"] == []


def test_clear_takes_one_namespace_or_all_but_only_our_files(
    cache: PageStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache.local is not None
    report = _json(capsys, "clear", str(cache.local), "--namespace", OTHER_NAMESPACE.hex()[:8])
    assert report == {"deleted": 3, "failed": 0, "bytes_left": 6 * SIZE}
    assert _left(cache) == set(MINE)
    assert not (cache.local / "v1" / OTHER_NAMESPACE.hex()).exists()
    cache.papers.save_index(b"x")
    assert main(["cache", "clear", str(cache.local)]) == 0
    assert "6 pages deleted, 0 bytes left" in capsys.readouterr().out
    files = [path.relative_to(cache.local) for path in cache.local.rglob("*") if path.is_file()]
    assert files == [Path("v1", NAMESPACE.hex(), "notes.txt")]
    assert _json(capsys, "stat", str(cache.local))["pages"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stat", "{}/nowhere"], "no such directory"),
        (["ls", "{}"], "holds no disk cache of tierax"),
        (["verify", "{}"], "holds no disk cache of tierax"),
        (["clear", "{}"], "holds no disk cache of tierax"),
        (["stat", "nosuch://bucket"], "unsupported URL scheme"),
        (["prune", "{}/cache"], "--size"),
        (["prune", "{}/cache", "--size", "many"], "'many' is not a size"),
        (["clear", "{}/cache", "--namespace", "ff00"], "no namespace starts with that"),
        (["clear", "{}/cache", "--namespace", ""], "2 namespaces start with that"),
        (["stat"], "required: DIR"),
        (["burn", "{}"], "burn"),
        ([], "COMMAND"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    cache: PageStore, tmp_path: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["cache", *(arg.format(tmp_path) for arg in args)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("tierax cache")
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["cache", "--help"])
    assert stop.value.code == 0
    assert "verify" in capsys.readouterr().out
