"""A store's threads, and the files that they write."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from helpers.disk_pages import answer, file_of, record, sequence
from tierax.cache.disk import local
from tierax.cache.disk.local import sweep_locks, write_file
from tierax.cache.disk.store import PageStore
from tierax.cache.disk.threads import Threads
from tierax.cache.moves import Outcome


@pytest.mark.skipif(sys.platform != "linux", reason="only there threads have a priority of their own")
@pytest.mark.parametrize("background", [False, True])
def test_only_threads_in_the_background_give_way(background: bool) -> None:
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen: list[int] = []
    threads = Threads("test", 1, background=background)
    threads.submit(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    threads.close(wait=True)
    assert (seen[0] > ours) == (background and ours < 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == ours


def test_tasks_left_at_the_end_run_and_later_ones_at_once() -> None:
    gate, ran = threading.Event(), []
    threads = Threads("test", 1)
    threads.submit(lambda: ran.append(gate.wait(10)))
    threads.submit(lambda: ran.append("left"))
    threads.close(wait=False)
    threads.submit(lambda: ran.append("late"))
    assert ran == ["late"]
    gate.set()
    threads.close(wait=True)
    assert ran == ["late", True, "left"]


def test_a_page_under_way_is_hidden_is_not_swept_and_may_be_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = PageStore(tmp_path), PageStore(tmp_path)
    (page,) = sequence(1)
    rename, seen = os.rename, []

    def look_around(unfinished: str, path: str) -> None:
        monkeypatch.setattr(local.os, "rename", rename)
        assert unfinished.endswith(local.LOCK_SUFFIX)
        seen.append((sweep_locks(tmp_path), list(other.list())))
        seen.append(answer(other.write, page, record(page)))
        rename(unfinished, path)

    monkeypatch.setattr(local.os, "rename", look_around)
    assert answer(store.write, page, record(page)) is Outcome.OK
    assert seen == [(0, []), Outcome.OK]
    assert file_of(store, page).read_bytes() == record(page)
    assert not list(tmp_path.rglob("*" + local.LOCK_SUFFIX))


def test_a_file_that_comes_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(f"{tmp_path}/folder", b"a page")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_went_away_is_made_again(tmp_path: Path) -> None:
    write_file(f"{tmp_path}/a/b/page", b"one")
    write_file(f"{tmp_path}/a/b/page", b"another")
    assert (tmp_path / "a/b/page").read_bytes() == b"another"
