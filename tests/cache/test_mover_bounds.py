"""The mover's bounds: what is in flight at once, how many buffers there are, and its end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from helpers.dict_store import DictStore
from helpers.mover_bench import LAYOUT, OK, PAGE, ArrayDevice, Bench, key
from tierax.cache.disk.page_records import PageRecords
from tierax.cache.disk.record import PageLayout
from tierax.cache.disk.share import Share
from tierax.cache.host_pool import HostPool
from tierax.cache.mover import TierMover
from tierax.cache.moves import Outcome


def test_reads_and_writes_in_flight_are_bounded(bench: Bench) -> None:
    bench.mover.close()
    size = LAYOUT.record_bytes
    bench = Bench(read_bytes=3 * size, write_bytes=2 * size)
    bench.stored(range(1, 9))
    bench.store.held = True
    keys = [key(i) for i in range(8)]
    read = bench.mover.read(keys, range(8))
    bench.until(lambda: bench.store.waiting == 3)
    assert bench.mover.read_backlog_bytes == 8 * PAGE
    assert bench.mover.bytes_held() == 3 * size
    for answered in range(1, 6):
        bench.store.answer(1)
        bench.until(lambda done=answered: sum(o is OK for o in read.outcomes) == done)
        assert bench.store.waiting == min(3, 8 - answered)
    bench.store.answer()
    bench.wait(read)

    write = bench.mover.write(keys, range(8))
    bench.until(lambda: bench.store.waiting == 2)
    bench.until(lambda: bench.mover.bytes_held() == 8 * size)
    assert bench.mover.write_backlog_bytes == 8 * PAGE
    while not write.done:
        assert bench.store.waiting <= 2
        bench.store.answer(1)
        bench.mover.poll(0.0)
    assert (write.good, bench.mover.write_backlog_bytes, bench.mover.bytes_held()) == (8, 0, 0)
    assert bench.mover.close()


def test_deletes_keep_their_place_between_writes(bench: Bench) -> None:
    bench.fill([1])
    for _ in range(3):
        bench.mover.write([key(0)], [0])
        bench.mover.delete([key(0), key(1)])
    bench.until(lambda: len(bench.store.calls) == 9)
    assert [verb for verb, k in bench.store.calls if k == key(0)] == ["write", "delete"] * 3
    assert bench.store.records == {}


def test_large_movements_pass_through_few_buffers() -> None:
    bench = Bench(rows=14, buffers=1)
    pages = list(range(14))
    for page in pages:
        bench.put(page, page + 1)
    save = bench.mover.save(pages, pages)
    bench.wait(save)
    bench.device.pages[:] = 0
    load = bench.mover.load(pages, pages[::-1])
    bench.wait(load)
    assert (save.good, load.good, bench.device.fewest_stagings) == (14, 14, 0)
    assert [bench.value(page) for page in pages] == [14 - page for page in pages]
    assert len(bench.device.scattered) == 7
    assert bench.wakes > 0
    assert bench.mover.close()


def test_a_save_without_a_free_buffer_is_not_stuck_behind_a_load() -> None:
    """Row 0's save waits for its load, which needs the one staging buffer that another load has filled."""
    bench = Bench(buffers=1)
    bench.fill([1, 2])
    loads = [bench.mover.load([1], [4]), bench.mover.load([0], [5])]
    bench.put(0, 7)
    saves = [bench.mover.save([0], [0]), bench.mover.save([0], [2])]
    bench.wait(*loads, *saves)
    assert (bench.value(4), bench.value(5)) == (2, 1)
    assert bench.mover.close()


def test_a_load_overtakes_saves_that_are_being_copied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes up is waited for; what goes down may have to wait for a processor."""
    bench.fill([1])
    gate, put = threading.Event(), bench.host.put

    def slow_put(pages: np.ndarray, rows: Sequence[int]) -> None:
        assert gate.wait(10)
        put(pages, rows)

    monkeypatch.setattr(bench.host, "put", slow_put)
    save = bench.mover.save([0, 1], [4, 5])
    bench.wait(bench.mover.load([0], [9]))
    assert bench.value(9) == 1
    assert not save.done
    gate.set()
    bench.wait(save)
    assert save.good == 2


def test_reset_drops_loads_and_saves_but_not_the_disk(bench: Bench) -> None:
    bench.stored([1, 2, 3])
    bench.store.held = True
    read = bench.mover.read([key(2)], [3])
    write = bench.mover.write([key(7)], [0])
    bench.device.steps_done.clear()
    save = bench.mover.save([0, 1, 2], [4, 5, 6])
    doomed = bench.mover.write([key(8)], [4])
    load = bench.mover.load([0], [9])
    assert bench.mover.reset() == {4, 5, 6}
    bench.device.steps_done.set()
    again = bench.mover.save([0], [4])
    bench.until(lambda: bench.store.waiting == 2)
    bench.store.answer()
    bench.wait(save, load, doomed, read, write, again)
    assert save.outcomes == [Outcome.CANCELLED] * 3
    assert load.outcomes == [Outcome.CANCELLED]
    assert doomed.outcomes == [Outcome.IO_ERROR]
    assert (read.good, write.good, again.good) == (1, 1, 1)
    assert bench.device.scattered == []
    assert bench.mover.reset() == set()
    assert (bench.device.blocks, bench.device.stagings) == (8, 8)


def test_reset_tells_of_saves_that_failed_and_nobody_has_seen(bench: Bench) -> None:
    bench.device.steps_done.clear()
    bench.mover.save([0, 1], [4, 5])
    wakes = bench.wakes
    bench.device.fault = RuntimeError("device gone")
    bench.device.steps_done.set()
    while bench.wakes == wakes:
        time.sleep(0.001)
    assert bench.mover.reset() == {4, 5}


def test_close_lets_saves_and_writes_end_and_drops_the_rest() -> None:
    bench = Bench(write_bytes=LAYOUT.record_bytes)
    bench.fill([1])
    bench.device.steps_done.clear()
    save = bench.mover.save([0, 1], [1, 2])
    write = bench.mover.write([key(0), key(1)], [0, 1])
    load = bench.mover.load([0], [5])
    threading.Timer(0.05, bench.device.steps_done.set).start()
    assert bench.mover.close()
    assert len(bench.store.records) == 2
    late = bench.mover.save([0], [3])
    bench.mover.delete([key(0)])
    bench.wait(save, write, load, late)
    assert (save.good, write.good) == (2, 2)
    assert (load.outcomes, late.outcomes) == ([Outcome.CANCELLED], [Outcome.CANCELLED])
    assert len(bench.store.records) == 2
    assert bench.mover.close(), "twice does no harm"


def test_close_waits_for_a_stalled_disk_only_so_long() -> None:
    bench = Bench()
    bench.fill([1])
    bench.store.held = True
    write = bench.mover.write([key(0)], [0])
    bench.until(lambda: bench.store.waiting == 1)
    began = time.monotonic()
    assert not bench.mover.close(0.1)
    assert time.monotonic() - began < 3
    bench.store.answer()
    bench.wait(write)
    assert write.good == 1, "the store's answer may come later still"


def test_stats_of_each_kind(bench: Bench) -> None:
    bench.stored([1, 2])
    load = bench.mover.load([0, 1], [0, 1])
    read = bench.mover.read([key(0)], [2])
    bench.wait(load, read)
    stats = bench.mover.stats
    moved = {kind: (s.moves, s.pages, s.bytes, sum(s.latency_counts)) for kind, s in stats.kinds.items()}
    assert moved == {
        "save": (2, 2, 2 * PAGE, 2),
        "load": (1, 2, 2 * PAGE, 1),
        "read": (1, 1, PAGE, 1),
        "write": (1, 2, 2 * PAGE, 2),
    }
    for kind, move in (("load", load), ("read", read)):
        assert stats.kinds[kind].seconds == move.seconds > 0
        assert stats.kinds[kind].latency_ms == pytest.approx(move.seconds * 1e3, rel=0.5)


def test_nothing_to_move_is_told_of_too(bench: Bench) -> None:
    moves = [bench.mover.save([], []), bench.mover.load([], []), bench.mover.read([], [])]
    assert bench.mover.poll(0.0) == moves
    assert bench.mover.poll(0.0) == []


def test_pages_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="'device': 192, 'host': 100"):
        TierMover(ArrayDevice(), HostPool(2, 100), clock=itertools.count().__next__)
    records = PageRecords(DictStore(), Share.whole(PageLayout((PAGE + 1,), "uint8")))
    with pytest.raises(ValueError, match="'disk': 193"):
        TierMover(ArrayDevice(), HostPool(2, PAGE), clock=itertools.count().__next__, records=records)
