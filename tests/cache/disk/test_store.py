"""The page store over directories and tensorstore URLs: one behaviour, and nothing but its own files touched."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from helpers.disk_pages import (
    LAYOUT,
    NAMESPACE,
    OTHER_NAMESPACE,
    answer,
    answers,
    file_of,
    fill,
    payload,
    read_into,
    record,
    sequence,
)
from tierax.cache.disk.names import parse_page_name
from tierax.cache.disk.record import pack, unpack
from tierax.cache.disk.store import PageStore, Stored, StoreError, classify
from tierax.cache.moves import Outcome
from tierax.cache.page_keys import PageKey

KEYS = sequence(5)


def test_records_come_back_and_are_listed(store: PageStore) -> None:
    fill(store, KEYS)
    for key in KEYS:
        outcome, found = answer(store.read, key)
        assert outcome is Outcome.OK
        assert bytes(unpack(found, key, LAYOUT)) == payload(key)
    nbytes = LAYOUT.record_bytes if store.local else None
    assert sorted(store.list()) == sorted(Stored(key, nbytes) for key in KEYS)


def test_absent_and_deleted_pages_are_missing(store: PageStore) -> None:
    assert answer(store.read, KEYS[0]) == (Outcome.MISSING, None)
    fill(store, KEYS[:2])
    assert answer(store.delete, KEYS[0]) is Outcome.OK
    assert answer(store.delete, KEYS[0]) is Outcome.OK, "what is absent is deleted already"
    assert answer(store.read, KEYS[0]) == (Outcome.MISSING, None)
    assert [page.key for page in store.list()] == [KEYS[1]]


def test_storing_again_is_success_and_the_last_record_stays(store: PageStore) -> None:
    changed = pack(KEYS[0], LAYOUT, bytes(LAYOUT.nbytes))
    calls = [(store.write, KEYS[0], record(KEYS[0])) for _ in range(20)]
    assert answers([*calls, (store.write, KEYS[0], changed)]) == [Outcome.OK] * 21
    assert answer(store.read, KEYS[0]) == (Outcome.OK, changed)


def test_operations_on_a_key_keep_the_order_of_the_calls(store: PageStore) -> None:
    for _ in range(20):
        outcomes = answers(
            [
                (store.write, KEYS[0], record(KEYS[0])),
                (store.delete, KEYS[0]),
                (store.write, KEYS[1], record(KEYS[1])),
                (store.delete, KEYS[1]),
                (store.write, KEYS[0], record(KEYS[0])),
            ]
        )
        assert outcomes == [Outcome.OK] * 5
        assert [page.key for page in store.list()] == [KEYS[0]]


def test_hundreds_in_flight_from_several_threads(store: PageStore) -> None:
    keys = [key for start in range(8) for key in sequence(25, bytes([start]))]
    threads = [threading.Thread(target=fill, args=(store, keys[i::4])) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = answers((store.read, key) for key in keys)
    assert [bytes(unpack(found, key, LAYOUT)) for key, (_, found) in zip(keys, results, strict=True)] == [
        payload(key) for key in keys
    ]


def test_records_are_read_straight_into_memory(store: PageStore) -> None:
    fill(store, KEYS)
    assert read_into(store, KEYS[3]) == (Outcome.OK, record(KEYS[3]))
    buffers = [tuple(memoryview(bytearray(size)) for size in (100, LAYOUT.record_bytes - 100)) for _ in KEYS]
    outcomes = answers((store.read_into, key, into) for key, into in zip(KEYS, buffers, strict=True))
    assert set(outcomes) == {Outcome.OK}
    assert [b"".join(into) for into in buffers] == [record(key) for key in KEYS]


def test_a_record_of_another_length_is_corrupt(store: PageStore) -> None:
    fill(store, KEYS[:1])
    assert read_into(store, KEYS[0], LAYOUT.nbytes + 1)[0] is Outcome.CORRUPT
    assert read_into(store, KEYS[0], LAYOUT.nbytes - 1)[0] is Outcome.CORRUPT
    assert read_into(store, KEYS[1])[0] is Outcome.MISSING


def test_closed_store_answers_cancelled(store: PageStore) -> None:
    fill(store, KEYS[:1])
    assert store.close()
    assert answer(store.read, KEYS[0]) == (Outcome.CANCELLED, None)
    assert read_into(store, KEYS[0])[0] is Outcome.CANCELLED
    assert answer(store.write, KEYS[0], b"x") is Outcome.CANCELLED
    assert answer(store.delete, KEYS[0]) is Outcome.CANCELLED


def test_closing_ends_the_threads_that_read(store: PageStore) -> None:
    before = set(threading.enumerate())
    fill(store, KEYS[:1])
    assert read_into(store, KEYS[0])[0] is Outcome.OK
    assert len(set(threading.enumerate()) - before) >= 1
    assert store.close()
    assert set(threading.enumerate()) <= before


def test_close_waits_for_a_read_that_is_slow_to_be_taken(tmp_path: Path) -> None:
    store = PageStore(tmp_path, read_concurrency=1)
    fill(store, KEYS[:2])
    entered, go_on = threading.Event(), threading.Event()
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        entered.set()
        go_on.wait(20)

    buffers = [memoryview(bytearray(LAYOUT.record_bytes)) for _ in range(2)]
    store.read_into(KEYS[0], buffers[:1], done)
    store.read_into(KEYS[1], buffers[1:], outcomes.append)
    assert entered.wait(20)
    assert not store.close(timeout=0.05)
    go_on.set()
    assert store.close(timeout=20)
    assert outcomes == [Outcome.OK, Outcome.CANCELLED], "what had not begun is cancelled"


def test_close_waits_for_what_is_in_flight_but_not_for_ever(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    fill(store, KEYS[:1])
    entered, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def done(outcome: Outcome, found: bytes | None) -> None:
        entered.set()
        go_on.wait(20)
        ended.set()

    reader = threading.Thread(target=store.read, args=(KEYS[0], done))
    reader.start()
    assert entered.wait(20)
    assert not store.close(timeout=0.05)
    go_on.set()
    assert store.close(timeout=20)
    assert ended.is_set()
    reader.join()


def test_new_directory_is_for_its_owner_only(tmp_path: Path) -> None:
    PageStore(tmp_path / "deeper" / "cache")
    assert stat.S_IMODE((tmp_path / "deeper" / "cache").stat().st_mode) == 0o700


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PageStore("~/cache").local == tmp_path / "cache"


def test_restart_finds_what_was_stored(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    fill(store, KEYS)
    store.close()
    again = PageStore(tmp_path)
    assert {page.key for page in again.list()} == set(KEYS)
    assert bytes(unpack(answer(again.read, KEYS[3])[1], KEYS[3], LAYOUT)) == payload(KEYS[3])


def test_foreign_files_are_neither_listed_nor_touched(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    fill(store, KEYS[:1])
    page = file_of(store, KEYS[0])
    foreign = [
        tmp_path / "README",
        tmp_path / "v1" / "notes.txt",
        page.with_name(page.name + ".bak"),
        page.with_name(page.name.upper()),
        page.with_name("0" + page.name[1:] if page.name[0] != "0" else "1" + page.name[1:]),
        tmp_path / "v1" / "abcd" / "ef" / page.name,
        tmp_path / "v2" / page.relative_to(tmp_path / "v1"),
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    again = PageStore(tmp_path)
    assert [found.key for found in again.list()] == KEYS[:1]
    answer(again.delete, KEYS[0])
    again.papers.forget(NAMESPACE)
    assert all(path.read_bytes() == b"mine" for path in foreign)


@pytest.mark.parametrize(
    "name",
    [
        "v1/" + "ab" * 16,
        f"v1/{'ab' * 16}/cd/{'cd' * 16}.{'ab' * 16}",
        f"v1/{'ab' * 16}/cd/{'cd' * 16}.{'ab' * 16}.01",
        f"v1/{'ab' * 16}/cd/{'cd' * 16}.{'ab' * 16}.-1",
        f"v1/{'ab' * 16}/cd/{'cd' * 16}.{'ab' * 16}.1\n",
        f"v1/{'ab' * 16}/ce/{'cd' * 16}.{'ab' * 16}.1",
        f"v1/{'ab' * 15}/cd/{'cd' * 16}.{'ab' * 16}.1",
    ],
)
def test_only_exact_names_are_pages(name: str) -> None:
    assert parse_page_name(name) is None


def test_tenants_share_no_names(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    mine, theirs = sequence(1)[0], sequence(1, namespace=OTHER_NAMESPACE)[0]
    assert mine.key != theirs.key
    fill(store, [mine])
    assert answer(store.read, theirs) == (Outcome.MISSING, None)
    assert answer(store.read, mine._replace(namespace=OTHER_NAMESPACE)) == (Outcome.MISSING, None)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "give a directory"),
        ("http://localhost:1/", "web server"),
        ("file://host/path", "names a host"),
        ("nosuch://bucket/", "nosuch"),
        ('{"driver": "nosuch"}', "nosuch"),
        ("{broken", "double quotes"),
    ],
)
def test_what_cannot_be_a_store_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(StoreError, match=reason):
        PageStore(url)


def test_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a directory"):
        PageStore(tmp_path / "file")
    with pytest.raises(StoreError, match=r"Not a directory|File exists"):
        PageStore(tmp_path / "file" / "below")


def test_directory_to_read_only_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such directory"):
        PageStore(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_read_only_store_reads_and_changes_nothing(tmp_path: Path) -> None:
    fill(PageStore(tmp_path), KEYS[:2])
    left_over = file_of(PageStore(tmp_path), KEYS[0]).with_suffix(".5.__lock")
    left_over.write_bytes(b"half")
    store = PageStore(tmp_path, read_only=True)
    before = _tree(tmp_path)
    assert answer(store.read, KEYS[1])[0] is Outcome.OK
    assert answer(store.write, KEYS[2], record(KEYS[2])) is Outcome.DENIED
    assert answer(store.delete, KEYS[0]) is Outcome.DENIED
    assert not store.papers.save_index(b"x")
    store.papers.describe(NAMESPACE, {"model": "x"})
    assert _tree(tmp_path) == before


def test_unwritable_directory_becomes_read_only_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(PageStore(tmp_path), KEYS[:1])
    real = os.access
    # Root may write everywhere, so permissions alone would not make the case.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    with caplog.at_level(logging.WARNING):
        store = PageStore(tmp_path)
    assert store.read_only
    assert "not writable" in caplog.text
    assert answer(store.read, KEYS[0])[0] is Outcome.OK
    assert answer(store.write, KEYS[1], record(KEYS[1])) is Outcome.DENIED


def test_others_see_pages_as_they_are_written(tmp_path: Path) -> None:
    writer, reader = PageStore(tmp_path), PageStore(tmp_path, read_only=True)
    assert list(reader.list()) == []
    fill(writer, KEYS)
    assert {page.key for page in reader.list()} == set(KEYS)
    assert answer(reader.read, KEYS[4])[0] is Outcome.OK


def test_free_space_is_known_for_directories_only(tmp_path: Path) -> None:
    free = PageStore(tmp_path).free_bytes()
    assert free is not None
    assert free > 0
    assert PageStore("memory://").free_bytes() is None


def test_error_in_an_answer_is_logged_and_hurts_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PageStore(tmp_path)
    fill(store, KEYS[:1])
    called = threading.Event()

    def done(outcome: Outcome, found: object) -> None:
        called.set()
        raise RuntimeError("a bug of the caller's")

    store.read(KEYS[0], done)
    assert called.wait(20)
    assert answer(store.read, KEYS[0])[0] is Outcome.OK
    assert store.close(timeout=20)
    assert "a bug of the caller's" in caplog.text


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("RESOURCE_EXHAUSTED: Failed writing: \"x\" [os_error_code='28']", Outcome.NO_SPACE),
        ("X: quota [os_error_code='122']", Outcome.NO_SPACE),
        ("X: too large [os_error_code='27']", Outcome.NO_SPACE),
        ("PERMISSION_DENIED: Failed to open: \"x\" [os_error_code='13']", Outcome.DENIED),
        ("PERMISSION_DENIED: read-only [os_error_code='30']", Outcome.DENIED),
        ("NOT_FOUND: [os_error_code='2']", Outcome.MISSING),
        ("DATA_LOSS: Input/output error [os_error_code='5']", Outcome.IO_ERROR),
        ("RESOURCE_EXHAUSTED: too many open files [os_error_code='24']", Outcome.IO_ERROR),
        ("NOT_FOUND: no such bucket", Outcome.MISSING),
        ("UNAUTHENTICATED: credentials", Outcome.DENIED),
        ("UNAVAILABLE: try again", Outcome.IO_ERROR),
        ("CANCELLED: closing", Outcome.CANCELLED),
        ("", Outcome.IO_ERROR),
    ],
)
def test_errors_are_classified(text: str, outcome: Outcome) -> None:
    assert classify(ValueError(text)) is outcome


def _tree(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_names_are_spread_over_folders(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    fill(store, sequence(64))
    folders = {file_of(store, PageKey(*page.key)).parent.name for page in store.list()}
    assert len(folders) > 30
