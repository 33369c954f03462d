"""The arithmetic behind `tierax bench cache`: prices, summaries, answers compared, verdicts, late reads."""

from __future__ import annotations

import threading
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tierax.bench.agents import Conversation, Ideal, Workload
from tierax.bench.cache_engine import PageSize
from tierax.bench.cache_table import Row, Served, compare_answers, make_rows, summarize, table_targets
from tierax.bench.cache_ttft import ttft_targets
from tierax.bench.jitter_store import Jitter, JitterStore
from tierax.bench.raw_io import bytes_below, make_cold, memcpy_seconds, pread_seconds
from tierax.bench.targets import Target, targets_table
from tierax.lab.prices import Prices

PAGE = PageSize(tokens=16, bytes=1000, vocab_size=256)


def test_price_by_hand() -> None:
    # Half an hour of a $2.50 accelerator is $1.25; 73 GB of DRAM cost $3.65 a month, which is $0.005 an hour;
    # 730 GB of SSD $7.30, which is $0.01. Two million tokens: half of ($1.25 + $0.0075).
    price = Prices().per_million_tokens(
        seconds=1800, tokens=2_000_000, dram_bytes=73 * 10**9, ssd_bytes=730 * 10**9
    )
    assert price == pytest.approx((1.25 + 0.0025 + 0.005) / 2)
    assert "$2.5/h" in Prices().formula
    assert "$0.05 x GB" in Prices().formula


def _served(ttft: float, prompt: int = 100, **cached: int) -> Served:
    return Served(prompt, 10, cached, ttft, tpot=0.002)


def test_summary_by_hand() -> None:
    served = [
        _served(0.1),
        _served(0.2, device=40, host=20),
        _served(0.3, device=10, disk=80),
        _served(0.8, prompt=300, host=64),
    ]
    row = Row("DISK", 320, {}, host_bytes=5000, disk=True)
    figures = summarize(row, served, 2.0, PAGE, 50, disk_bytes=7000, prices=Prices())
    assert figures["ttft_ms_mean"] == pytest.approx(350)
    assert figures["ttft_ms_p50"] == pytest.approx(250)
    # Between the third and the fourth value, 97 % of the way.
    assert figures["ttft_ms_p99"] == pytest.approx(300 + 0.97 * 500)
    assert figures["ttft_ms_stddev"] == pytest.approx(((250**2 + 150**2 + 50**2 + 450**2) / 4) ** 0.5)
    assert figures["tpot_ms"] == pytest.approx(2.0)
    assert figures["req_s"] == 2.0
    assert figures["device_kv_bytes"] == 21 * 1000
    assert figures["hit_rate"] == pytest.approx(214 / 600)
    assert figures["hit_rate_by_tier"] == pytest.approx(
        {"device": 50 / 600, "host": 84 / 600, "disk": 80 / 600}
    )
    assert sum(figures["hit_rate_by_tier"].values()) == pytest.approx(figures["hit_rate"])
    # Behind 50 tokens of system prompt: 0 + 10 + 40 + 14 of 3 x 50 + 250.
    assert figures["hit_rate_own"] == pytest.approx(64 / 400)
    assert figures["usd_per_mtok"] == pytest.approx(
        Prices().per_million_tokens(seconds=2, tokens=640, dram_bytes=5000, ssd_bytes=7000)
    )


def test_rows_differ_in_their_caches_only_as_promised() -> None:
    workload = Workload(running=2, device_tokens=320)
    none, device, host, disk, everything = make_rows(workload, PAGE, Ideal(0.9, 0.7, pages=100))
    assert [r.name for r in (none, device, host, disk, everything)] == [
        "none",
        "DEVICE",
        "HOST",
        "DISK",
        "DEVICE-ALL",
    ]
    assert none.options == {"disable_radix_cache": True}
    assert device.device_tokens == host.device_tokens == disk.device_tokens == 320
    assert host.host_bytes == disk.host_bytes == 20 * PAGE.bytes, (
        "the host tier is as large as the device tier"
    )
    assert (device.host_bytes, everything.host_bytes) == (0, 0)
    assert everything.device_tokens == none.device_tokens >= 100 * 16
    assert host.options == {"write_policy": "write_back"}
    assert device.options == disk.options == everything.options == {}
    assert (none.part, device.part) == ((8, 16), None)
    assert [r.disk for r in (none, device, host, disk, everything)] == [False, False, False, True, False]


def test_answers_are_compared_up_to_the_first_difference() -> None:
    def conversation(*answers: list[int]) -> Conversation:
        return Conversation(3, [[1], [2], [3]], [], answers=list(answers))

    reference = {3: conversation([5, 6], [7, 8], [9, 9])}
    asked: list[list[int]] = []

    def gap(prompt: list[int]) -> float:
        asked.append(prompt)
        return 0.5

    assert compare_answers("HOST", reference, [conversation([5, 6], [7, 8], [9, 9])], gap) == []
    assert asked == []
    (found,) = compare_answers("HOST", reference, [conversation([5, 6], [7, 0], [1, 1])], gap)
    assert (found.row, found.conversation, found.turn, found.position) == ("HOST", 3, 1, 1)
    assert asked == [[1, 5, 6, 2, 7]], "history, the turn's message, and the answer up to the difference"
    assert not found.near_tie
    assert compare_answers("HOST", {}, [conversation([5, 6], [7, 0], [1, 1])], gap) == [], (
        "nothing to compare with"
    )
    (tie,) = compare_answers("HOST", reference, [conversation([5, 0], [7, 8], [9, 9])], lambda _: 1e-5)
    assert tie.near_tie


def _report() -> dict[str, Any]:
    def row(name: str, ttft: float, req_s: float, device: int) -> dict[str, Any]:
        return {
            "name": name,
            "ttft_ms_mean": ttft,
            "req_s": req_s,
            "device_kv_bytes": device,
            "hit_rate": 0.905,
        }

    rows = [row("none", 1000, 1, 100), row("DEVICE", 300, 3.0, 60), row("DISK", 200, 3.8, 60)]
    return {"configs": [*rows, row("DEVICE-ALL", 150, 4.0, 100)], "infinite_hit_rate": 0.912}


def test_the_table_is_judged() -> None:
    verdicts = {t.name: (t.value, t.limit, t.reached) for t in table_targets(_report())}
    assert verdicts["DISK: hit rate"] == (0.905, 0.873, True)
    assert verdicts["DISK: hit rate, against an infinite cache"][1:] == (pytest.approx(0.902), True)
    assert verdicts["DISK / none: TTFT"] == (0.2, 0.2, True)
    assert verdicts["DISK / none: requests/s"] == (3.8, 3.8, True)
    assert verdicts["DISK / DEVICE: requests/s"] == (pytest.approx(1.267, abs=0.001), 1.28, False)
    assert verdicts["DISK / DEVICE: TTFT"] == (pytest.approx(2 / 3), 0.6, False)
    assert verdicts["DISK / DEVICE-ALL: requests/s"] == (0.95, 0.9, True)
    assert verdicts["DISK / DEVICE-ALL: device KV bytes"] == (0.6, 0.6, True)


def test_first_tokens_are_judged_by_plain_copies() -> None:
    report = {
        "ttft_ms": {"cold": 5000.0, "device": 100.0, "host": 160.0, "disk": 400.0, "disk_warm": 300.0},
        "ttft": {
            "page_tokens": 16,
            "memcpy_ms": 20.0,
            "pread_ms": {"disk": 200.0, "disk_warm": 40.0},
            "recomputed_tokens": {"cold": 1900, "device": 12, "host": 12, "disk": 28, "disk_warm": 12},
        },
    }
    again, device, host, disk, warm = ttft_targets(report)
    assert (again.value, again.limit, again.reached) == (28, 17, False)
    assert (device.value, device.reached) == (0.02, True)
    assert (host.limit, host.reached) == (150, False)
    assert (disk.limit, disk.reached) == (100 + 250 + 50, True)
    assert (warm.limit, warm.reached) == (200, False)


def test_verdicts_are_shown() -> None:
    text = targets_table([Target("a", 0.25, "<=", 0.2, percent=True), Target("b", 4, ">=", 3.8)])
    assert "25.0%  <= 20.0%  NOT REACHED" in text
    assert text.splitlines()[-1].endswith("reached")
    assert Target("b", float("nan"), ">=", 3.8).reached is False


def test_plain_reads_and_copies(tmp_path: Path) -> None:
    ticks = count()
    files = [tmp_path / "a" / "x", tmp_path / "y"]
    files[0].parent.mkdir()
    for file in files:
        file.write_bytes(b"0" * 3_000_000)
    assert bytes_below(tmp_path) == 6_000_000
    make_cold(files)
    assert pread_seconds(files, lambda: float(next(ticks)), readers=2) == 1.0
    assert memcpy_seconds(100, lambda: float(next(ticks))) == 1.0
    assert files[1].read_bytes() == b"0" * 3_000_000


class _Key:
    def __init__(self, key: bytes) -> None:
        self.key = key


class _Store:
    """Answers at once."""

    colour = "red"

    def __init__(self) -> None:
        self.closed: list[float] = []

    def read_into(self, key: _Key, buffers: Any, done: Any) -> None:
        buffers[0][:] = key.key
        done("ok")

    def close(self, timeout: float) -> bool:
        self.closed.append(timeout)
        return True


def test_late_reads_come_late_and_once_each() -> None:
    jitter = Jitter(usual=0.0, stall_share=0.3, stall=(0.2, 0.3), seed=5)
    names = [bytes([n]) for n in range(40)]
    late = {name for name in names if jitter.delay(name) > 0}
    assert 4 < len(late) < 24
    assert jitter.delay(b"\0") == Jitter(usual=0.0, stall_share=0.3, stall=(0.2, 0.3), seed=5).delay(b"\0")

    inner = _Store()
    store = JitterStore(inner, jitter)
    assert store.colour == "red", "the rest of the interface is the store's own"
    arrived: list[bytes] = []
    prompt_ones, all_of_them = threading.Event(), threading.Event()

    def done(buffer: bytearray, outcome: str) -> None:
        assert outcome == "ok"
        arrived.append(bytes(buffer))
        if len(arrived) == len(names) - len(late):
            prompt_ones.set()
        if len(arrived) == len(names):
            all_of_them.set()

    for name in names:
        buffer = bytearray(1)
        store.read_into(_Key(name), (memoryview(buffer),), partial(done, buffer))
    assert prompt_ones.wait(5)
    assert all_of_them.wait(5)
    assert set(arrived[-len(late) :]) == late
    assert store.close(3.0) is True
    assert inner.closed == [3.0]
    assert sorted(arrived) == names


def test_closing_hands_over_what_is_late() -> None:
    store = JitterStore(_Store(), Jitter(stall_share=1.0, stall=(60.0, 60.0)))
    arrived: list[bytes] = []
    buffer = bytearray(1)
    store.read_into(_Key(b"a"), (memoryview(buffer),), lambda outcome: arrived.append(bytes(buffer)))
    assert arrived == []
    store.close(1.0)
    assert arrived == [b"a"]
