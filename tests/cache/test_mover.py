"""The mover between a device, rows and a store that a test can hold up: order, failures, bounds, ends."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash

from helpers.dict_store import DictStore
from tierax.cache.disk.page_records import PageRecords
from tierax.cache.disk.record import PageLayout
from tierax.cache.disk.share import Share
from tierax.cache.host_pool import HostPool
from tierax.cache.mover import TierMover
from tierax.cache.moves import Move, Outcome
from tierax.cache.page_keys import PageKey

PAGE = 192
LAYOUT = PageLayout((PAGE,), "uint8")
OK = Outcome.OK


def key(number: int) -> PageKey:
    name = number.to_bytes(16, "big")
    return PageKey(b"n" * 16, name, b"p" * 16, number)


class Gathering:
    def __init__(self, device: ArrayDevice, pages: Sequence[int]) -> None:
        self._device = device
        self._rows = device.pages[list(pages)]
        self.error: Exception | None = None

    def is_ready(self) -> bool:
        return self._device.steps_done.is_set()

    def rows(self) -> np.ndarray:
        if self._device.fault is not None:
            raise self._device.fault
        return self._rows

    def release(self) -> None:
        self._device.blocks += 1

    abandon = release


class ArrayDevice:
    """A device pool in NumPy. While `steps_done` is not set, no gather is ready."""

    page_bytes = PAGE
    batch_pages = 2
    bytes_held = 0

    def __init__(self, num_pages: int = 16, buffers: int = 8) -> None:
        self.pages = np.zeros((num_pages, PAGE), np.uint8)
        self.steps_done = threading.Event()
        self.steps_done.set()
        self.blocks = buffers
        self.stagings = buffers
        self.fewest_stagings = buffers
        self.fault: Exception | None = None
        self.scattered: list[list[int]] = []

    def gather(self, pages: Sequence[int]) -> Gathering | None:
        if self.fault is not None:
            raise self.fault
        assert len(pages) <= self.batch_pages
        if self.blocks == 0:
            return None
        self.blocks -= 1
        return Gathering(self, pages)

    def take_staging(self) -> Any:
        if self.stagings == 0:
            return None
        self.stagings -= 1
        self.fewest_stagings = min(self.fewest_stagings, self.stagings)
        return Staging(self.batch_pages)

    def upload(self, staging: Any, count: int) -> None: ...

    def scatter(self, staging: Any, pages: Sequence[int]) -> None:
        self.stagings += 1
        if self.fault is not None:
            raise self.fault
        self.scattered.append(list(pages))
        self.pages[list(pages)] = staging.rows[: len(pages)]

    def give_back(self, staging: Any) -> None:
        self.stagings += 1


class Staging:
    def __init__(self, pages: int) -> None:
        self.rows = np.zeros((pages, PAGE), np.uint8)


class GatedHost(HostPool):
    """Rows that are copied from only while `open` is set."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, PAGE)
        self.open = threading.Event()
        self.open.set()

    def get(self, rows: Sequence[int], pages: np.ndarray) -> None:
        assert self.open.wait(10)
        super().get(rows, pages)


class Bench:
    """A mover with all its neighbours, and the verbs of a test."""

    def __init__(self, rows: int = 8, buffers: int = 8, **settings: Any) -> None:
        self.device = ArrayDevice(buffers=buffers)
        self.host = GatedHost(rows)
        self.store = DictStore()
        self.wakes = 0
        self.mover = TierMover(
            self.device,
            self.host,
            clock=time.monotonic,
            records=PageRecords(self.store, Share.whole(LAYOUT)),
            wake=self._wake,
            **settings,
        )

    def _wake(self) -> None:
        self.wakes += 1

    def put(self, page: int, value: int) -> None:
        """As a step does that writes a page."""
        self.device.pages[page] = value

    def value(self, page: int) -> int:
        values = set(self.device.pages[page].tolist())
        assert len(values) == 1, "a page of two halves"
        return values.pop()

    def wait(self, *moves: Move) -> None:
        self.until(lambda: all(move.done for move in moves))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            self.mover.poll(0.0)
            assert time.monotonic() < end, "nothing happens"
            time.sleep(0.0005)

    def fill(self, values: Sequence[int]) -> None:
        """Rows 0, 1, … get the values, by way of device page 15."""
        for row, value in enumerate(values):
            self.put(15, value)
            self.wait(self.mover.save([15], [row]))

    def stored(self, values: Sequence[int]) -> None:
        """The store gets pages `key(0)`, `key(1)`, … with the values."""
        self.fill(values)
        move = self.mover.write([key(i) for i in range(len(values))], range(len(values)))
        self.wait(move)
        assert move.good == len(values)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.device.fault = None
    bench.device.steps_done.set()
    bench.host.open.set()
    bench.store.held = False
    bench.store.answer()
    assert bench.mover.close(5)


def test_a_saved_page_may_be_written_again_at_once(bench: Bench) -> None:
    bench.device.steps_done.clear()
    bench.put(3, 7)
    save = bench.mover.save([3], [0])
    bench.put(3, 9)
    load = bench.mover.load([0], [5])
    time.sleep(0.02)
    assert bench.mover.poll(0.0) == [], "its steps are not done yet"
    bench.device.steps_done.set()
    bench.wait(save, load)
    assert (save.outcomes, load.outcomes, bench.value(5)) == ([OK], [OK], 7)


def test_a_load_sees_its_rows_before_four_new_pages_are_saved_into_them(bench: Bench) -> None:
    bench.fill([1, 2, 3, 4])
    bench.host.open.clear()
    loads = [bench.mover.load([0, 1, 2, 3], [4, 5, 6, 7])]
    for page, value in enumerate([11, 12, 13, 14]):
        bench.put(page, value)
    saves = [bench.mover.save([0, 1, 2, 3], [0, 1, 2, 3])]
    loads.append(bench.mover.load([0, 1, 2, 3], [8, 9, 10, 11]))
    time.sleep(0.02)
    assert bench.mover.poll(0.0) == []
    bench.host.open.set()
    bench.wait(*loads, *saves)
    assert [bench.value(page) for page in range(4, 12)] == [1, 2, 3, 4, 11, 12, 13, 14]


def test_a_load_overtakes_saves_that_wait_for_the_device(bench: Bench) -> None:
    bench.fill([1])
    bench.device.steps_done.clear()
    save = bench.mover.save([3], [1])
    load = bench.mover.load([0], [5])
    bench.wait(load)
    assert (load.good, save.done, bench.value(5)) == (1, False, 1)


@pytest.mark.parametrize("seed", range(3))
def test_one_row_sees_movements_in_the_order_of_the_calls(seed: int) -> None:
    """Random saves, loads and writes of few rows and few pages against a model that runs each at once."""
    rng = np.random.default_rng(seed)
    bench = Bench(rows=3, buffers=2)
    rows, records = [0, 1, 2], {}
    bench.fill(rows)
    moves: list[Move] = []
    expected: list[tuple[int, int]] = []
    for number in range(1, 60):
        row = int(rng.integers(3))
        match rng.integers(4):
            case 0:
                bench.put(0, number)
                moves.append(bench.mover.save([0], [row]))
                rows[row] = number
            case 1:
                # Every load has a page of its own; its bytes are looked at when it is done.
                page = 1 + len(expected) % 14
                if len(expected) >= 14:
                    continue
                moves.append(bench.mover.load([row], [page]))
                expected.append((page, rows[row]))
            case 2:
                moves.append(bench.mover.write([key(row)], [row]))
                records[row] = rows[row]
            case _:
                bench.mover.poll(0.0)
    bench.wait(*moves)
    assert all(move.good == 1 for move in moves)
    assert [(page, bench.value(page)) for page, _ in expected] == expected
    for row, value in records.items():
        back = bench.mover.read([key(row)], [0])
        bench.wait(back)
        load = bench.mover.load([0], [15])
        bench.wait(load)
        assert (back.good, bench.value(15)) == (1, value)
    assert bench.mover.close()


def test_a_row_given_to_a_read_is_first_copied_by_the_load_before(bench: Bench) -> None:
    bench.stored([1, 2])
    bench.host.open.clear()
    load = bench.mover.load([0], [4])
    read = bench.mover.read([key(1)], [0])
    time.sleep(0.02)
    assert bench.mover.poll(0.0) == []
    bench.host.open.set()
    bench.wait(load, read)
    after = bench.mover.load([0], [5])
    bench.wait(after)
    assert (bench.value(4), bench.value(5)) == (1, 2)


def cut(record: bytes) -> bytes:
    return record[:-10]


def flip(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


def rename_dtype(record: bytes) -> bytes:
    """As a program writes it that knows dtypes which this one does not; its checksum is right."""
    other = record.replace(b'"uint8"', b'"uint7"')
    return other[:24] + xxhash.xxh3_64(other[:24] + other[32:]).intdigest().to_bytes(8, "little") + other[32:]


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Outcome.IO_ERROR, Outcome.IO_ERROR),
        (Outcome.MISSING, Outcome.MISSING),
        (cut, Outcome.CORRUPT),
        (flip, Outcome.CORRUPT),
        (rename_dtype, Outcome.CORRUPT),
        ("other", Outcome.CORRUPT),
        ("raise", Outcome.IO_ERROR),
    ],
)
def test_a_bad_record_fails_its_page_only(bench: Bench, fault: Any, outcome: Outcome) -> None:
    bench.stored([1, 2, 3, 4])
    bad = key(1)
    if isinstance(fault, Outcome):
        bench.store.faults[bad] = fault
    elif fault == "other":
        bench.store.records[bad] = bench.store.records[key(2)]
    elif fault == "raise":
        bench.store.raises.add(bad)
    else:
        bench.store.spoil[bad] = fault
    read = bench.mover.read([key(i) for i in range(4)], [4, 5, 6, 7])
    bench.wait(read)
    assert read.outcomes == [OK, outcome, OK, OK]
    assert read.good == 1
    load = bench.mover.load([4, 5, 6, 7], [0, 1, 2, 3])
    bench.wait(load)
    assert load.outcomes == [OK, Outcome.IO_ERROR, OK, OK], "a row that was not filled is never copied from"
    assert [bench.value(page) for page in range(4)] == [1, 0, 3, 4]
    assert bench.mover.stats.read.failures[outcome] == 1
    assert (bench.mover.stats.read.pages, bench.mover.stats.read.bytes) == (3, 3 * PAGE)

    bench.store.faults.clear()
    bench.store.raises.clear()
    bench.store.spoil.clear()
    again = bench.mover.read([key(0), key(3)], [5, 6])
    bench.wait(again)
    assert again.good == 2


def test_writing_is_per_page_and_may_be_repeated(bench: Bench) -> None:
    bench.stored([1, 2, 3])
    bench.fill(range(1, 9))
    keys = [key(i) for i in range(8)]
    bench.store.faults[key(5)] = Outcome.NO_SPACE
    bench.store.raises.add(key(6))
    first = bench.mover.write(keys, range(8))
    bench.wait(first)
    assert first.outcomes == [OK, OK, OK, OK, OK, Outcome.NO_SPACE, Outcome.IO_ERROR, OK]
    assert len(bench.store.records) == 6
    bench.store.faults.clear()
    bench.store.raises.clear()
    again = bench.mover.write(keys[5:7], [5, 6])
    bench.wait(again)
    assert again.good == 2
    assert len(bench.store.records) == 8
    stats = bench.mover.stats.write
    assert (stats.pages, stats.failures[Outcome.NO_SPACE], stats.failures[Outcome.IO_ERROR]) == (11, 1, 1)
    assert sum(stats.latency_counts) == 11


def test_nothing_is_made_of_pages_that_the_device_lost(bench: Bench) -> None:
    bench.fill([1])
    bench.device.steps_done.clear()
    lost = bench.mover.save([0, 1, 2], [0, 1, 2])
    write = bench.mover.write([key(0), key(1)], [0, 1])
    load = bench.mover.load([2], [5])
    bench.device.fault = RuntimeError("out of memory")
    bench.device.steps_done.set()
    bench.wait(lost, write, load)
    failed = Outcome.IO_ERROR
    assert lost.outcomes == [failed] * 3
    assert write.outcomes == [failed] * 2, "the old bytes of row 0 are not page key(0) either"
    assert load.outcomes == [failed]
    assert bench.store.records == {}
    refused = bench.mover.save([0], [0])
    bench.wait(refused)
    assert refused.outcomes == [failed], "the gather itself raised"

    bench.device.fault = None
    bench.put(0, 9)
    save, write = bench.mover.save([0], [0]), bench.mover.write([key(0)], [0])
    bench.wait(save, write)
    assert (save.good, write.good) == (1, 1)


def test_a_scatter_that_raises_fails_its_load(bench: Bench) -> None:
    bench.fill([1])
    load = bench.mover.load([0], [3])
    bench.device.fault = RuntimeError("device gone")
    bench.wait(load)
    assert load.outcomes == [Outcome.IO_ERROR]
    bench.device.fault = None
    again = bench.mover.load([0], [3])
    bench.wait(again)
    assert bench.value(3) == 1


def test_a_cancelled_load_reaches_no_page(bench: Bench) -> None:
    bench.fill([1, 2, 3, 4])
    bench.host.open.clear()
    early = bench.mover.load([0, 1, 2, 3], [4, 5, 6, 7])
    bench.mover.cancel(early)
    bench.host.open.set()
    late = bench.mover.load([0, 1], [8, 9])
    while bench.device.stagings == 8:
        time.sleep(0.001)
    bench.mover.cancel(late)
    news = bench.mover.poll(0.0)
    assert news == [early, late]
    assert early.outcomes == [Outcome.CANCELLED] * 4
    bench.mover.cancel(late)
    last = bench.mover.load([0], [10])
    bench.wait(last)
    assert (bench.device.scattered, bench.device.stagings) == ([[10]], 8)


def test_a_cancelled_read_keeps_what_was_asked_for(bench: Bench) -> None:
    bench.mover.close()
    bench = Bench(read_bytes=2 * LAYOUT.record_bytes)
    bench.stored([1, 2, 3, 4])
    bench.store.held = True
    read = bench.mover.read([key(i) for i in range(4)], [4, 5, 6, 7])
    bench.until(lambda: bench.store.waiting == 2)
    bench.mover.cancel(read)
    bench.until(lambda: read.outcomes[2:] == [Outcome.CANCELLED] * 2)
    assert read.outcomes[:2] == [None, None], "their rows belong to the read until they are seen"
    bench.store.answer()
    bench.wait(read)
    assert read.outcomes[:2] == [OK, OK]
    assert bench.mover.close()


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
