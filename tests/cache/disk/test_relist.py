"""What another process writes to the same store is found while both run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from helpers.disk_pages import LAYOUT, fill, sequence
from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.local import StoreError
from tierax.cache.disk.names import Stored
from tierax.cache.disk.relist import Relist
from tierax.cache.disk.store import PageStore


def wait_for(relist: Relist[list[Stored]]) -> list[Stored]:
    for _ in range(2000):
        if (found := relist.take()) is not None:
            return found
        time.sleep(0.005)
    raise AssertionError("nothing was listed")


def test_another_writers_pages_become_hits(tmp_path: Path) -> None:
    ours, theirs = PageStore(tmp_path), PageStore(tmp_path)
    index = DiskIndex(None)
    relist = Relist(lambda: list(ours.list()), 0.01, clock=time.monotonic)
    keys = sequence(4)
    try:
        assert wait_for(relist) == []
        # The tail comes first: without its head it is no hit, and must not be removed either.
        fill(theirs, keys[2:])
        assert index.add_listed(wait_until(relist, 2), LAYOUT.record_bytes, spare_orphans=True) == []
        assert index.match(keys) == 0
        fill(theirs, keys[:2])
        assert index.add_listed(wait_until(relist, 4), LAYOUT.record_bytes, spare_orphans=True) == []
        assert index.match(keys) == 4
        index.check()
    finally:
        relist.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tierax-relist"]


def wait_until(relist: Relist[list[Stored]], count: int) -> list[Stored]:
    while len(found := wait_for(relist)) < count:
        pass
    return found


def test_a_store_that_cannot_be_listed_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([StoreError("disk cache s3://x: gone"), []])

    def listing() -> list[Stored]:
        answer = next(answers, [])
        if isinstance(answer, StoreError):
            raise answer
        return answer

    relist = Relist(listing, 0.005, clock=time.monotonic)
    try:
        assert wait_for(relist) == []
    finally:
        relist.close()
    assert "s3://x: gone" in caplog.text
