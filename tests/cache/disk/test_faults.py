"""Real faults of a file system, and injected ones: every one has its outcome, and the store goes on afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from helpers.disk_pages import LAYOUT, answer, answers, file_of, fill, payload, read_into, record, sequence
from helpers.faulty_store import Fault, FaultyStore
from tierax.cache.disk.local import sweep_locks
from tierax.cache.disk.record import RecordError, unpack
from tierax.cache.disk.store import PageStore
from tierax.cache.disk.upkeep import check_pages
from tierax.cache.moves import Outcome

KEYS = sequence(8)
ROOT = Path(__file__).resolve().parents[3]


def _outcome(store: PageStore, place: int) -> str:
    """What a reader makes of a page, whichever way it reads: an outcome, or `corrupt`, or `good`."""
    seen = _fetched(store, place)
    outcome, found = read_into(store, KEYS[place])
    if outcome is Outcome.OK and found != record(KEYS[place]):
        assert seen in ("corrupt", "good")
        outcome = Outcome.CORRUPT
    assert outcome.value == ("ok" if seen == "good" else seen)
    return seen


def _fetched(store: PageStore, place: int) -> str:
    outcome, found = answer(store.read, KEYS[place])
    if outcome is not Outcome.OK:
        return outcome.value
    try:
        return "good" if bytes(unpack(found, KEYS[place], LAYOUT)) == payload(KEYS[place]) else "wrong bytes"
    except RecordError:
        return "corrupt"


def test_damaged_files_are_told_apart_from_good_ones(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    fill(store, KEYS)
    short, flipped, vanished, emptied, swapped, folder = (file_of(store, key) for key in KEYS[:6])
    os.truncate(short, LAYOUT.record_bytes - 10)
    data = bytearray(flipped.read_bytes())
    data[-1000] ^= 4
    flipped.write_bytes(data)
    vanished.unlink()
    emptied.write_bytes(b"")
    swapped.write_bytes(file_of(store, KEYS[7]).read_bytes())
    folder.unlink()
    folder.mkdir()
    found = [_outcome(store, place) for place in range(8)]
    assert found == ["corrupt", "corrupt", "missing", "corrupt", "corrupt", "missing", "good", "good"]


def test_damaged_page_is_whole_again_once_rewritten(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    fill(store, KEYS[:2])
    file_of(store, KEYS[0]).write_bytes(b"rubbish")
    assert _outcome(store, 0) == "corrupt"
    fill(store, KEYS[:1])
    assert _outcome(store, 0) == "good"


def test_bad_neighbour_does_not_fail_the_batch_and_may_be_tried_again(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    fill(store, KEYS[:3])
    rule = store.inject("write", Fault.EIO, [KEYS[5]], times=1)
    outcomes = answers((store.write, key, record(key)) for key in KEYS)
    assert outcomes == [Outcome.OK] * 5 + [Outcome.IO_ERROR] + [Outcome.OK] * 2
    assert rule.hits == 1
    assert {page.key for page in store.list()} == set(KEYS) - {KEYS[5]}
    assert answer(store.write, KEYS[5], record(KEYS[5])) is Outcome.OK
    assert [_outcome(store, place) for place in range(8)] == ["good"] * 8


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (Fault.EIO, "io_error"),
        (Fault.DENIED, "denied"),
        (Fault.VANISHED, "missing"),
        (Fault.SHORT, "corrupt"),
        (Fault.FLIPPED, "corrupt"),
    ],
)
def test_injected_faults_of_reads(tmp_path: Path, fault: Fault, seen: str) -> None:
    store = FaultyStore(tmp_path, seed=3)
    fill(store, KEYS)
    store.inject("read", fault, [KEYS[1]])
    assert [_outcome(store, place) for place in range(3)] == ["good", seen, "good"]
    store.heal()
    assert _outcome(store, 1) == "good"


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.FLIPPED])
def test_disk_that_lies_about_a_write_is_found_out(tmp_path: Path, fault: Fault) -> None:
    store = FaultyStore(tmp_path)
    store.inject("write", fault, times=1)
    fill(store, KEYS[:2])
    assert [_outcome(store, place) for place in range(2)] == ["corrupt", "good"]
    bad = [key for key, _, reason in check_pages(store, KEYS[:2]) if reason]
    assert bad == KEYS[:1]


def test_stalled_read_holds_up_nothing_else(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    fill(store, KEYS)
    store.inject("read", Fault.STALLED, [KEYS[0]])
    late: list[Outcome] = []
    store.read(KEYS[0], lambda outcome, found: late.append(outcome))
    assert [_outcome(store, place) for place in range(1, 8)] == ["good"] * 7
    assert (late, store.stalled) == ([], 1)
    store.heal()
    assert _outcome(store, 0) == "good"


def test_chances_follow_the_seed(tmp_path: Path) -> None:
    def faults(seed: int) -> list[str]:
        store = FaultyStore(tmp_path, seed=seed)
        store.inject("read", Fault.EIO, share=0.5)
        return [_fetched(store, place) for place in range(8)]

    fill(PageStore(tmp_path), KEYS)
    assert faults(1) == faults(1)
    assert {"good", "io_error"} == {*faults(1), *faults(2)}


def test_slow_disk_is_slow_but_right(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    store.delay("write", 0.05, 0.1)
    started = time.perf_counter()
    fill(store, KEYS)
    assert 0.05 <= time.perf_counter() - started < 5
    assert [_outcome(store, place) for place in range(8)] == ["good"] * 8


def test_full_disk_refuses_the_page_leaves_no_trace_and_recovers(tmp_path: Path) -> None:
    # A limit on the size of files stands for a full disk: both stop a write in the middle.
    report = _run(
        f"""
        import resource, sys
        from helpers.disk_pages import *
        store = PageStore({str(tmp_path)!r})
        small, large = sequence(2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
        print(answer(store.write, large, record(large)).value, len(list(store.list())))
        print(answer(store.write, small, record(small)[:5000]).value)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(answer(store.write, large, record(large)).value, len(list(store.list())))
        """
    )
    assert report.split() == ["no_space", "0", "ok", "ok", "2"]
    assert not list(tmp_path.rglob("*.__lock"))


def test_permissions_taken_away_are_denied_and_recovered_from() -> None:
    with tempfile.TemporaryDirectory() as base:
        _permissions_come_and_go(Path(base))


def _permissions_come_and_go(base: Path) -> None:
    # Root may write everywhere, so it becomes nobody; pytest's own folders are closed to that one.
    base.chmod(0o755)
    cache = base / "cache"
    cache.mkdir()
    if os.getuid() == 0:
        os.chown(cache, 65534, 65534)
    report = _run(
        f"""
        import os, sys
        from helpers.disk_pages import *
        if os.getuid() == 0:
            os.setgid(65534), os.setuid(65534)
        store = PageStore({str(cache)!r})
        one, two = sequence(2)
        fill(store, [one])
        folder = file_of(store, one).parent
        folder.chmod(0o500)
        other = one._replace(parent=two.key, depth=3)
        print(answer(store.write, other, record(other)).value)
        print(answer(store.delete, one).value)
        file_of(store, one).chmod(0)
        print(answer(store.read, one)[0].value)
        file_of(store, one).chmod(0o600)
        folder.chmod(0o700)
        print(answer(store.read, one)[0].value, answer(store.write, other, record(other)).value)
        os.chmod({str(cache)!r}, 0o500)
        print(PageStore({str(cache)!r}).read_only)
        os.chmod({str(cache)!r}, 0o700)
        """
    )
    assert report.split() == ["denied", "denied", "denied", "ok", "ok", "True"]


@pytest.mark.parametrize("seed", range(4))
def test_killed_writer_leaves_whole_pages_and_a_store_that_opens(tmp_path: Path, seed: int) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _script(_WRITER.format(path=str(tmp_path), seed=seed))],
        stdout=subprocess.PIPE,
        env=_environment(),
        text=True,
    )
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline().strip() for _ in range(20 + 37 * seed)]
    writer.send_signal(signal.SIGKILL)
    rest, _ = writer.communicate(timeout=60)
    acknowledged += rest.splitlines()[:-1]
    store = PageStore(tmp_path)
    assert not list(tmp_path.rglob("*.__lock"))
    listed = {page.key: page.nbytes for page in store.list()}
    assert {key.key.hex() for key in listed} >= set(acknowledged)
    problems = [reason for _, _, reason in check_pages(store, listed) if reason]
    assert problems == []
    assert set(listed.values()) <= {LAYOUT.record_bytes}
    fill(store, KEYS)
    assert [_outcome(store, place) for place in range(8)] == ["good"] * 8


def test_left_overs_are_swept_but_not_those_of_a_living_writer(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    fill(store, KEYS[:1])
    dead = file_of(store, KEYS[0]).with_name("dead.__lock")
    living = file_of(store, KEYS[0]).with_name("living.__lock")
    dead.write_bytes(b"half a page")
    living.write_bytes(b"half a page")
    holder = subprocess.Popen(
        [sys.executable, "-c", _script(_HOLDER.format(path=str(living)))], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert sweep_locks(tmp_path) == 1
    assert (dead.exists(), living.exists()) == (False, True)
    holder.kill()
    holder.communicate(timeout=60)
    PageStore(tmp_path, read_only=True)
    assert living.exists(), "who only reads removes nothing"
    PageStore(tmp_path)
    assert not living.exists(), "whoever opens it to write sweeps"
    assert _outcome(store, 0) == "good"


_WRITER = """
from helpers.disk_pages import *
store = PageStore({path!r})
for start in range(1000):
    keys = sequence(4, bytes([{seed}, start % 256, start // 256]))
    fill(store, keys)
    for key in keys:
        print(key.key.hex(), flush=True)
"""

_HOLDER = """
import fcntl, os, struct, sys, time
descriptor = os.open({path!r}, os.O_RDWR)
if hasattr(fcntl, "F_OFD_SETLK"):
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
else:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def _script(text: str) -> str:
    return textwrap.dedent(text)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}


def _run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", _script(script)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
