"""Replicas that keep in touch by threads of their own, over one directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.disk_pages import LAYOUT, fill, sequence
from tierax.cache.disk.board import Board
from tierax.cache.disk.fleet import Fleet
from tierax.cache.disk.fleet_thread import FleetThread
from tierax.cache.disk.shared_index import SharedIndex
from tierax.cache.disk.store import PageStore, StoreError
from tierax.cache.policies.policy import Use

SIZE = LAYOUT.record_bytes
LEASE, TURN = 1.0, 0.02
KEYS = sequence(6)


class Server:
    """A replica whose engine takes a turn when it is told to."""

    def __init__(self, store: PageStore, name: bytes, pages: int = 100) -> None:
        self.store = store
        self.index = SharedIndex(pages * SIZE)
        self.fleet = Fleet(name, self.index, record_bytes=SIZE, lease=LEASE)
        self._ticks = 0
        self.board = Board(store, lease=LEASE, clock=time.monotonic)
        self.thread = FleetThread(self.board, self.fleet, TURN, self.use)

    def use(self) -> Use:
        self._ticks += 1
        return Use(self._ticks, time.monotonic())

    def write(self) -> None:
        assert all(self.index.reserve(key, SIZE, self.use()) == [] for key in KEYS)
        fill(self.store, KEYS)
        for key in KEYS:
            self.index.stored(key)


def turn_until(servers: list[Server], what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, "it does not come to pass"
        for server in servers:
            server.thread.turn()
        time.sleep(0.005)


@pytest.fixture
def store(tmp_path: Path) -> PageStore:
    return PageStore(tmp_path)


def test_what_one_writes_the_other_hears_of_and_one_deletes_for_both(store: PageStore) -> None:
    first, second = Server(store, b"first---", 6), Server(store, b"second--", 6)
    first.write()
    both = [first, second]
    turn_until(both, lambda: second.index.match(KEYS) == 6)
    assert second.fleet.stats.replicas == 2
    # 6 pages of 6 are too many, and nobody uses them any more.
    turn_until(both, lambda: first.fleet.stats.deleted_pages + second.fleet.stats.deleted_pages == 2)
    assert {page.key for page in store.list()} == set(KEYS[:4])
    turn_until(both, lambda: first.index.match(KEYS) == second.index.match(KEYS) == 4)
    turn_until(both, lambda: first.fleet.collects != second.fleet.collects)
    for server in both:
        server.thread.close()
    assert first.board.read().notes == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "tierax-fleet"]


def test_an_engine_that_takes_no_turns_is_not_waited_for_and_comes_back(store: PageStore) -> None:
    first, second = Server(store, b"first---"), Server(store, b"second--")
    turn_until([second], lambda: second.fleet.collects and second.fleet.stats.replicas == 1)
    turn_until([first, second], lambda: second.fleet.stats.replicas == first.fleet.stats.replicas == 2)
    assert not first.fleet.collects
    first.thread.close()
    second.thread.close()


def test_a_store_that_fails_is_asked_again(
    store: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(store, b"first---")
    real = server.board.read

    def broken(*_: object) -> None:
        raise StoreError("disk cache s3://x: gone")

    monkeypatch.setattr(server.board, "read", broken)
    turn_until([server], lambda: "gone; it is tried again" in caplog.text)
    monkeypatch.setattr(server.board, "read", real)
    turn_until([server], lambda: server.fleet.collects)
    server.thread.close()
    assert caplog.text.count("tried again") == 1
