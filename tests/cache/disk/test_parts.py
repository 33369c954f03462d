"""Pages in parts by KV head: whoever wrote them, however many processes read them, a row gets its heads or is a miss."""

from __future__ import annotations

import hashlib
import json
import queue
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.disk_pages import answer, record, sequence
from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.names import PartKey, Stored, page_name, parse_part_name, record_name
from tierax.cache.disk.page_records import PageRecords
from tierax.cache.disk.record import PageLayout, Part, RecordError, inspect, pack, unpack
from tierax.cache.disk.share import Share
from tierax.cache.disk.shared_index import SharedIndex
from tierax.cache.disk.store import PageStore
from tierax.cache.disk.team import MemberRecords, TeamRecords, page_key
from tierax.cache.disk.upkeep import check_pages
from tierax.cache.moves import Outcome
from tierax.cache.page_keys import PageKey
from tierax.cache.policies.policy import Use
from tierax.cli.main import main

KEYS = sequence(4)
KEY = KEYS[0]
HEADS, SLOTS, WIDTH = 4, 6, 10


def layout(heads: int = HEADS) -> PageLayout:
    return PageLayout((2, 3, heads, WIDTH), "uint8")


def shares(held: Sequence[range]) -> list[Share]:
    return [Share.of(layout(held[-1].stop), SLOTS, held, process) for process in range(len(held))]


HALVES = (range(2), range(2, 4))
ALL = (range(4),)


def page_of(key: PageKey, heads: int = HEADS) -> np.ndarray:
    """u8 `[SLOTS, heads, WIDTH]`, of that page only."""
    raw = hashlib.shake_128(key.key).digest(SLOTS * heads * WIDTH)
    return np.frombuffer(raw, np.uint8).reshape(SLOTS, heads, WIDTH)


def row_of(key: PageKey, share: Share) -> bytes:
    return page_of(key, share.heads)[:, share.held.first : share.held.end].tobytes()


def write(store: PageStore, key: PageKey, held: Sequence[range], only: Sequence[int] | None = None) -> None:
    """As processes do that hold these heads: process 0, whose record is the page's own, comes last."""
    for share in reversed(shares(held)):
        if only is None or share.process in only:
            records = PageRecords(store, share)
            packed = records.pack(key, memoryview(bytearray(row_of(key, share))))
            assert answer(records.write, key, packed) is Outcome.OK


def read(store: PageStore, key: PageKey, share: Share) -> tuple[Outcome, bytes]:
    row = bytearray(b"?" * share.row_bytes)
    return answer(PageRecords(store, share).read, key, 0, memoryview(row)), bytes(row)


def spoil(store: PageStore, key: PartKey | PageKey) -> None:
    assert store.local is not None
    path = store.local / record_name(key)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def store(tmp_path: Path) -> PageStore:
    return PageStore(tmp_path)


def split(rng: random.Random, heads: int) -> list[range]:
    """Some processes, the heads that each holds: all of them; neighbours may have some in common."""
    held, first = [], 0
    while first < heads:
        end = rng.randint(first + 1, heads)
        held += [range(first, end)] * rng.choice((1, 1, 2))
        first = end if rng.random() < 0.8 or end - first < 2 else end - 1
        if end == heads:
            break
    return held


def test_what_one_process_writes_has_not_changed_by_a_byte() -> None:
    digest = hashlib.sha256(record(KEY)).hexdigest()
    assert digest == "1e8997a3f97a8477dd55bcacff4bda8d0a8a49d404eae3ede93388991ec91df0"


def test_names_of_parts_are_told_from_those_of_pages() -> None:
    part = PartKey(KEY, 2, 12)
    assert record_name(part) == page_name(KEY) + ".2-12"
    assert parse_part_name(record_name(part)) == part
    for other in (page_name(KEY), page_name(KEY) + ".2-", page_name(KEY) + ".02-3", "v1/index.0-1"):
        assert parse_part_name(other) is None


def test_records_of_parts_say_what_they_are_and_are_nothing_else() -> None:
    first, second = (PageRecords(PageStore("memory://"), share) for share in shares(HALVES))
    packed = first.pack(KEY, memoryview(row_of(KEY, first.share)))
    parts = (Part(0, 2, 120), Part(2, 4, 120))
    assert inspect(packed)[:2] == (KEY, PageLayout(layout().shape, "uint8", parts))
    with pytest.raises(RecordError, match="other layout"):
        unpack(packed, KEY, PageLayout(layout().shape, "uint8", parts[:1]))
    packed = second.pack(KEY, memoryview(row_of(KEY, second.share)))
    found, described, payload = inspect(packed)
    assert (found, described.parts, bytes(payload)) == (KEY, parts[1:], row_of(KEY, second.share))
    meta = json.loads(packed[32:4096].rstrip(b"\0"))
    assert meta["parts"] == [{"heads": [2, 4], "offset": 0, "bytes": 120}]


@pytest.mark.parametrize("seed", range(12))
def test_any_processes_read_what_any_others_wrote(tmp_path: Path, seed: int) -> None:
    store = PageStore(tmp_path if seed % 3 else "memory://")
    rng = random.Random(seed)
    heads = rng.randint(1, 6)
    for key in KEYS:
        for _ in range(rng.choice((1, 2))):
            write(store, key, split(rng, heads))
    readers = shares(split(rng, heads))
    for share in readers:
        records = PageRecords(store, share)
        for key in rng.choices(KEYS, k=8):
            row = bytearray(share.row_bytes)
            assert answer(records.read, key, 0, memoryview(row)) is Outcome.OK, share
            assert bytes(row) == row_of(key, share)
    # Whatever was written over what: it counts, is whole, and goes as one.
    listed = list(store.list())
    assert sorted(page.key for page in listed) == sorted(KEYS)
    if store.local is not None:
        on_disk = [path.stat().st_size for path in store.local.glob("v1/*/*/*")]
        assert sum(page.nbytes or 0 for page in listed) == sum(on_disk)
    assert [reason for _, _, reason in check_pages(store, KEYS)] == [None] * 4
    for key in KEYS:
        assert answer(store.delete, key) is Outcome.OK
    assert not store.papers.kv.list().result(timeout=10)


def test_every_head_is_written_once_by_processes_that_hold_some_in_common() -> None:
    team = shares((range(1), range(1), range(1, 3), range(2, 4)))
    assert [share.own for share in team] == [(0, 1), (1, 1), (1, 3), (3, 4)]
    assert team[0].record_bytes == 3 * 4096 + layout().nbytes
    assert PageRecords(PageStore("memory://"), team[1]).pack(KEY, memoryview(row_of(KEY, team[1]))) == b""
    # One head for all: process 0 writes the page as a single process would.
    alone = shares((range(1), range(1)))
    assert alone[0].parts == ()
    assert alone[0].record_bytes == layout(1).record_bytes


def test_a_page_counts_with_all_of_its_parts(store: PageStore) -> None:
    write(store, KEY, HALVES)
    assert list(store.list()) == [Stored(KEY, shares(HALVES)[0].record_bytes)]


def test_parts_whose_page_was_never_finished_are_no_page_and_go(store: PageStore) -> None:
    write(store, KEYS[0], HALVES)
    write(store, KEYS[1], HALVES, only=[1])
    for share in (*shares(HALVES), *shares(ALL)):
        assert read(store, KEYS[1], share)[0] in (Outcome.MISSING, Outcome.OK)
    assert read(store, KEYS[1], shares(ALL)[0])[0] is Outcome.MISSING
    assert answer(store.probe, KEYS[1]) is Outcome.MISSING
    # A new start.
    store = PageStore(store.url)
    listed = list(store.list())
    index = DiskIndex(None)
    assert [page.key for page in listed if page.only_parts] == [KEYS[1]]
    assert index.add_listed(listed) == [KEYS[1]]
    assert len(index) == 1
    assert answer(store.delete, KEYS[1]) is Outcome.OK
    assert [page.key for page in store.list()] == [KEYS[0]]


def test_where_others_write_parts_without_a_page_go_after_a_while(store: PageStore) -> None:
    write(store, KEYS[0], HALVES)
    write(store, KEYS[1], HALVES, only=[1])
    index = SharedIndex(10**9)
    for now in (0.0, 5.0):
        index.take_listing(index.compare(list(store.list())), 0, Use(int(now), now))
    none = {"most": 9, "orphan_age": 10.0}
    assert index.choose(10**9, 6.0, spare=lambda key: False, **none) == []
    assert index.choose(10**9, 11.0, spare=lambda key: key == KEYS[1], **none) == [], "it is being written"
    assert index.choose(10**9, 11.0, spare=lambda key: False, **none) == [KEYS[1]]
    # Finished in time, it is a page like any other.
    index.end_doom([KEYS[1]])
    write(store, KEYS[1], HALVES)
    index.take_listing(index.compare(list(store.list())), 0, Use(20, 20.0))
    assert index.is_stored(KEYS[1])
    index.check()


def test_a_part_that_is_spoilt_or_lost_costs_those_who_need_it(store: PageStore) -> None:
    first, second = shares(HALVES)
    quarters = shares((range(1), range(1, 2), range(2, 3), range(3, 4)))
    write(store, KEY, HALVES)
    spoil(store, PartKey(KEY, 2, 4))
    assert read(store, KEY, first) == (Outcome.OK, row_of(KEY, first))
    for share in (second, *quarters[2:], *shares(ALL)):
        assert read(store, KEY, share)[0] is Outcome.CORRUPT
    assert read(store, KEY, quarters[1]) == (Outcome.OK, row_of(KEY, quarters[1]))
    ((_, _, reason),) = check_pages(store, [KEY])
    assert reason is not None
    assert reason.startswith("heads 2 to 4: checksum")
    assert answer(store.delete, PartKey(KEY, 2, 4)) is Outcome.OK
    for share in (second, *shares(ALL)):
        assert read(store, KEY, share)[0] is Outcome.MISSING
    assert [reason for _, _, reason in check_pages(store, [KEY])] == ["heads 2 to 4: missing"]


def test_parts_of_another_page_or_of_other_heads_are_refused(store: PageStore) -> None:
    write(store, KEYS[0], HALVES)
    write(store, KEYS[1], HALVES)
    assert store.local is not None
    stranger = store.local / record_name(PartKey(KEYS[1], 2, 4))
    own = store.local / record_name(PartKey(KEYS[0], 2, 4))
    own.write_bytes(stranger.read_bytes())
    for share in (shares(HALVES)[1], *shares(ALL)):
        assert read(store, KEYS[0], share)[0] is Outcome.CORRUPT
    # The first half of the right page under the name of the second.
    own.write_bytes((store.local / page_name(KEYS[0])).read_bytes())
    assert read(store, KEYS[0], shares(ALL)[0])[0] is Outcome.CORRUPT


def test_a_page_that_lists_less_than_all_heads_is_refused(store: PageStore) -> None:
    half = PageLayout(layout().shape, "uint8", (Part(0, 2, 120),))
    record = pack(KEY, half, row_of(KEY, shares(HALVES)[0]))
    assert answer(store.write, KEY, record) is Outcome.OK
    for share in (*shares(HALVES), *shares(ALL)):
        assert read(store, KEY, share)[0] is Outcome.CORRUPT
    ((_, _, reason),) = check_pages(store, [KEY])
    assert reason == "header: its parts are not the whole page"


def test_the_command_line_sees_pages_and_not_parts(
    store: PageStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in KEYS[:3]:
        write(store, key, HALVES)
    write(store, KEYS[3], HALVES, only=[1])
    assert main(["cache", "verify", store.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pages"], report["bad"], report["orphans"]) == (3, [], 1)
    spoil(store, PartKey(KEYS[1], 2, 4))
    assert main(["cache", "verify", store.url, "--delete"]) == 1
    assert "3 pages: 1 bad, 1 without" in capsys.readouterr().out
    assert [page.key for page in PageStore(store.url).list()] == [KEYS[0]]
    assert main(["cache", "stat", store.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pages"], report["bytes"]) == (1, shares(HALVES)[0].record_bytes)
    assert main(["cache", "clear", store.url]) == 0
    assert not list(PageStore(store.url).list())


class Team:
    """Process 0 and two others over one store; commands arrive at once, or when told."""

    def __init__(
        self, store: PageStore, held: Sequence[range] = (range(2), range(2, 3), range(3, 4))
    ) -> None:
        self.shares = shares(held)
        self.held = False
        self.rows = [bytearray(share.row_bytes) for share in self.shares]
        self.members = [MemberRecords(store, share) for share in self.shares[1:]]
        self.leader = TeamRecords(store, self.shares[0], len(self.members), self._send)
        self.commands: list[tuple[Any, ...]] = []
        self.failing: set[int] = set()
        """Processes whose records cannot be made."""

    def put(self, key: PageKey) -> None:
        for share, row in zip(self.shares, self.rows, strict=True):
            row[:] = row_of(key, share)

    def write(self, key: PageKey, done: Callable[[Outcome], None]) -> None:
        self.leader.order(key, 0)
        self.leader.write(key, self.leader.pack(key, memoryview(self.rows[0])), done)

    def read(self, key: PageKey) -> Outcome:
        for row in self.rows:
            row[:] = bytes(len(row))
        return answer(self.leader.read, key, 0, memoryview(self.rows[0]))

    def go_on(self) -> None:
        """What was held back arrives."""
        self.held = False
        commands, self.commands = self.commands, []
        for command in commands:
            self._send(*command)

    def _send(self, command: str, number: int, *arguments: Any) -> None:
        if self.held:
            self.commands.append((command, number, *arguments))
            return
        for member, row in zip(self.members, self.rows[1:], strict=True):
            tell = self._teller(number)
            match command:
                case "pack":
                    key = page_key(arguments[0])
                    member.order(number, key)
                    if member.share.process in self.failing:
                        member.give_up(key)
                        tell(Outcome.IO_ERROR)
                    else:
                        member.write(key, member.pack(key, memoryview(bytes(row))), tell)
                case "read":
                    member.read(page_key(arguments[0]), arguments[1], memoryview(row), tell)
                case _:
                    member.decide(number, store=command == "store")

    def _teller(self, number: int) -> Callable[[Outcome], None]:
        return lambda outcome: self.leader.heard(number, outcome.value)


def test_a_team_writes_a_page_and_reads_it(store: PageStore) -> None:
    team = Team(store)
    team.put(KEY)
    assert answer(team.write, KEY) is Outcome.OK
    assert team.read(KEY) is Outcome.OK
    assert [bytes(row) for row in team.rows] == [row_of(KEY, share) for share in team.shares]
    assert read(store, KEY, shares(ALL)[0])[0] is Outcome.OK
    assert answer(team.leader.delete, KEY) is Outcome.OK
    assert list(store.list()) == []


def test_the_page_is_there_when_the_last_part_is(store: PageStore) -> None:
    team = Team(store)
    team.put(KEY)
    team.held = True
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    team.write(KEY, outcomes.put)
    assert [name for name, *_ in team.commands] == ["pack", "store"]
    assert answer(store.probe, KEY) is Outcome.MISSING
    assert outcomes.empty()
    team.go_on()
    assert outcomes.get(timeout=10) is Outcome.OK
    assert team.read(KEY) is Outcome.OK


@pytest.mark.parametrize("failing", [1, 2])
def test_a_part_that_cannot_be_made_leaves_no_page(store: PageStore, failing: int) -> None:
    team = Team(store)
    team.put(KEY)
    team.failing = {failing}
    assert answer(team.write, KEY) is Outcome.IO_ERROR
    assert answer(store.probe, KEY) is Outcome.MISSING
    assert answer(team.leader.delete, KEY) is Outcome.OK
    assert list(store.list()) == [], "a part has stayed"
    team.failing.clear()
    assert answer(team.write, KEY) is Outcome.OK
    assert team.read(KEY) is Outcome.OK


def test_a_write_that_process_0_cannot_make_is_dropped_by_all(store: PageStore) -> None:
    team = Team(store)
    team.put(KEY)
    team.leader.order(KEY, 0)
    team.leader.give_up(KEY)
    assert list(store.list()) == []
    assert answer(team.write, KEY) is Outcome.OK
    assert team.read(KEY) is Outcome.OK


def test_what_one_process_cannot_read_nobody_has_read(store: PageStore) -> None:
    team = Team(store)
    team.put(KEY)
    assert answer(team.write, KEY) is Outcome.OK
    spoil(store, PartKey(KEY, 3, 4))
    assert team.read(KEY) is Outcome.CORRUPT
    assert answer(store.delete, PartKey(KEY, 3, 4)) is Outcome.OK
    assert team.read(KEY) is Outcome.MISSING
    assert team.read(KEYS[1]) is Outcome.MISSING


def test_a_page_is_deleted_before_it_is_written_again(store: PageStore) -> None:
    team = Team(store)
    team.put(KEY)
    assert answer(team.write, KEY) is Outcome.OK
    outcomes: list[Outcome] = []
    for _ in range(20):
        team.leader.delete(KEY, outcomes.append)
        assert answer(team.write, KEY) is Outcome.OK
    assert team.read(KEY) is Outcome.OK
    assert outcomes == [Outcome.OK] * 20
