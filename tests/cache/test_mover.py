"""The mover between a device, rows and a store that a test can hold up: order, and failures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import xxhash

from helpers.mover_bench import LAYOUT, OK, PAGE, Bench, key
from tierax.cache.moves import Move, Outcome


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
