"""Several replicas write to one store in simulated time, die, stall and come back; a model says what may happen to a page."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from helpers.disk_pages import LAYOUT, answer, answers, record, sequence
from helpers.tier_mirror import STORAGE, TierMirror
from tierax.cache.disk.board import Board
from tierax.cache.disk.fleet import FULL, Fleet, News
from tierax.cache.disk.local import StoreError
from tierax.cache.disk.names import CLAIM_NAME, FLEET, Stored
from tierax.cache.disk.notes import NOBODY, Claim, Note, pack_claim, pack_note, parse_claim, parse_note
from tierax.cache.disk.shared_index import SharedIndex
from tierax.cache.disk.store import PageStore
from tierax.cache.moves import Outcome
from tierax.cache.page_events import PageLog
from tierax.cache.page_keys import PageKey
from tierax.cache.policies.policy import Use
from tierax.serving.events.messages import block_hash

LEASE = 12.0
TURN = 2.0
SIZE = LAYOUT.record_bytes
CHAINS = [sequence(6, b"%d" % i) for i in range(40)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Replica:
    """A process: its index, its fleet and its board. The clocks of the replicas differ, and only `clock` knows the truth."""

    def __init__(self, place: Place, number: int, *, capacity: int) -> None:
        self.skew = random.Random(number).uniform(-1e6, 1e6)
        self.place = place
        self.index = SharedIndex(capacity)
        self.index.listener = self.log = PageLog(10**6, told=())
        self.mirror = TierMirror()
        self.fleet = Fleet(bytes([number] * 8), self.index, record_bytes=SIZE, lease=LEASE)
        self.board = Board(place.store, lease=LEASE, clock=self.clock)
        self.deleted: tuple[PageKey, ...] = ()
        self.ticks = 0
        for _ in range(2):
            self.turn()
        self.relist()

    def clock(self) -> float:
        return self.place.clock() + self.skew

    def use(self) -> Use:
        self.ticks += 1
        return Use(self.ticks, self.clock())

    def relist(self) -> None:
        self.index.take_listing(self.index.compare(list(self.place.store.list())), SIZE, self.use())

    def turn(self, *, die: bool = False) -> None:
        """One turn; `die`: before the last of what it was to do."""
        self.turned = self.place.clock()
        news = self.board.read(self.deleted)
        orders = self.fleet.turn(news, self.use())
        self.index.check()
        # Whoever hears the events knows what this replica knows.
        self.mirror.hear(self.log.take(10**6).events, page_size=1)
        assert self.mirror.blocks[STORAGE] == {block_hash(key.key) for key in self.index.stored_keys()}
        self.place.check_orders(self, orders.delete)
        if die:
            orders = orders._replace(claim=None, delete=())
        self.deleted = self.board.carry_out(orders, news.generation)
        self.place.deleted(self.deleted)

    def write(self, chain: list[PageKey]) -> int:
        """As the writer does; returns how many pages were written."""
        written = 0
        self.index.touch(chain, self.use())
        for key in chain:
            known = key in self.index
            if self.index.reserve(key, SIZE, self.use()) is None:
                break
            if not known:
                assert answer(self.place.store.write, key, record(key)) is Outcome.OK
                self.index.stored(key)
                written += 1
        self.place.used(self, chain[: self.index.match(chain)])
        return written

    def read(self, chain: list[PageKey]) -> int:
        """As the prefetcher does; returns how many pages came."""
        hits = chain[: self.index.match(chain)]
        self.index.lock(hits)
        self.place.used(self, hits)
        good = 0
        for key, (outcome, _) in zip(
            hits, answers((self.place.store.read, key) for key in hits), strict=True
        ):
            if outcome is Outcome.MISSING:
                self.index.remove(key, "missing")
                break
            good += 1
        self.index.unlock(hits)
        return good


class Place:
    """The store, the clock, and what the model knows of uses."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = PageStore("memory://")
        self.last_use: dict[PageKey, float] = {}
        self.stalled: set[Replica] = set()
        """Their uses do not count: nobody can know of them."""

    def used(self, replica: Replica, keys: list[PageKey]) -> None:
        if replica not in self.stalled:
            for key in keys:
                self.last_use[key] = self.clock()

    def check_orders(self, collector: Replica, keys: tuple[PageKey, ...]) -> None:
        for key in keys:
            age = self.clock() - self.last_use.get(key, float("-inf"))
            assert age > LEASE, f"a page that was used {age} s ago is deleted"

    def deleted(self, keys: tuple[PageKey, ...]) -> None:
        there = {page.key for page in self.store.list()}
        for key in keys:
            assert key not in there
            self.last_use.pop(key, None)
        for key in there:
            # Heads before tails, but for what nobody has the heads of.
            assert not key.depth or key.parent not in {gone.key for gone in keys}, "a tail without its head"

    @property
    def bytes(self) -> int:
        return SIZE * len(list(self.store.list()))

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds


@pytest.fixture
def place() -> Place:
    return Place()


def turns(place: Place, replicas: list[Replica], count: int) -> None:
    for _ in range(count):
        place.pass_time(TURN)
        for replica in replicas:
            replica.turn()


def test_what_one_has_written_is_a_hit_for_another_a_turn_later(place: Place) -> None:
    first, second = Replica(place, 1, capacity=100 * SIZE), Replica(place, 2, capacity=100 * SIZE)
    assert first.write(CHAINS[0]) == 6
    assert second.read(CHAINS[0]) == 0
    turns(place, [first, second], 1)
    assert second.read(CHAINS[0]) == 6
    assert second.write(CHAINS[0]) == 0


def test_the_cap_counts_what_all_have_written_and_tails_go_first(place: Place) -> None:
    replicas = [Replica(place, number, capacity=30 * SIZE) for number in (1, 2, 3)]
    for number, chain in enumerate(CHAINS[:5]):
        assert replicas[number % 3].write(chain) == 6
        turns(place, replicas, 1)
    turns(place, replicas, 1)
    # Full: nobody writes more, until what nobody has used for a lease is gone.
    assert replicas[0].write(CHAINS[5]) == 0
    assert place.bytes == 30 * SIZE
    for _ in range(4):
        replicas[2].read(CHAINS[1])
        turns(place, replicas, 2)
    left = [sum(page.key in chain for page in place.store.list()) for chain in CHAINS[:5]]
    assert left == [0, 6, 6, 6, 6]
    assert replicas[0].write(CHAINS[5]) == 6
    assert sum(replica.fleet.collects for replica in replicas) == 1
    assert {replica.fleet.stats.replicas for replica in replicas} == {3}


def test_a_page_that_is_used_while_it_is_doomed_stays(place: Place) -> None:
    first, second = Replica(place, 1, capacity=13 * SIZE), Replica(place, 2, capacity=13 * SIZE)
    first.write(CHAINS[0])
    first.write(CHAINS[1])
    while not first.index.doomed:
        turns(place, [second, first], 1)
    # The other one has not heard of it: for it this is a hit, and remains one.
    assert CHAINS[0][-1] in first.index.doomed
    assert second.read(CHAINS[0]) == 6
    turns(place, [first], 2)
    turns(place, [second, first], 4)
    assert second.read(CHAINS[0]) == 6
    assert first.read(CHAINS[0]) == 6
    assert first.fleet.stats.spared_pages > 0


def test_a_dead_collector_is_replaced_and_a_dead_reader_is_not_waited_for(place: Place) -> None:
    replicas = [Replica(place, number, capacity=12 * SIZE) for number in (1, 2, 3)]
    turns(place, replicas, 1)
    collector = next(replica for replica in replicas if replica.fleet.collects)
    one, other = (replica for replica in replicas if replica is not collector)
    one.write(CHAINS[0])
    other.write(CHAINS[1])
    other.turn()
    turns(place, [one], int(2 * LEASE / TURN) + 4)
    assert one.fleet.collects
    assert one.fleet.stats.replicas == 1
    assert place.bytes <= FULL * 12 * SIZE
    names = [name for name in place.store.papers.kv.list().result() if name.startswith(FLEET.encode())]
    assert len(names) == 2, "the notes of the dead stay"
    # They were only asleep: they come back, and there is one collector still.
    turns(place, replicas, 3)
    assert one.fleet.stats.replicas == 3
    assert [replica.fleet.collects for replica in (one, other, collector)] == [True, False, False]


def test_orphans_go_but_not_at_once(place: Place) -> None:
    first = Replica(place, 1, capacity=100 * SIZE)
    for key in CHAINS[0][2:]:
        answer(place.store.write, key, record(key))
    first.relist()
    turns(place, [first], int(LEASE / TURN) - 1)
    assert place.bytes == 4 * SIZE
    turns(place, [first], 4)
    assert place.bytes == 0
    assert first.index.total_bytes == 0


def test_a_stalled_collector_deletes_nothing_after_its_lease(place: Place) -> None:
    slow, quick = Replica(place, 1, capacity=12 * SIZE), Replica(place, 2, capacity=12 * SIZE)
    slow.write(CHAINS[0])
    slow.write(CHAINS[1])
    turns(place, [slow, quick], 1)
    assert slow.fleet.collects
    orders, news = None, None
    while orders is None or not orders.delete:
        place.pass_time(TURN)
        quick.turn()
        news = slow.board.read(slow.deleted)
        orders = slow.fleet.turn(news, slow.use())
        if not orders.delete:
            slow.deleted = slow.board.carry_out(orders, news.generation)
    assert news is not None
    place.pass_time(LEASE + TURN)
    turns(place, [quick], int(LEASE / TURN) + 2)
    assert quick.fleet.collects
    before = place.bytes
    assert slow.board.carry_out(orders, news.generation) == ()
    assert place.bytes == before


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 40))])
def test_random_replicas(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    capacity = 60 * SIZE
    replicas = [Replica(place, number, capacity=capacity) for number in range(1, 4)]
    born = 3
    over_since: float | None = None
    for _ in range(220):
        place.pass_time(chance.uniform(0.2, 0.8) * TURN)
        replica = chance.choice(replicas)
        roll = chance.random()
        if roll < 0.35:
            # Some conversations are had more often than others.
            replica.write(CHAINS[min(int(chance.expovariate(0.1)), len(CHAINS) - 1)][: chance.randint(1, 6)])
        elif roll < 0.6:
            replica.read(chance.choice(CHAINS[:12]))
        elif roll < 0.63:
            replica.relist()
        elif roll < 0.65 and len(replicas) > 1:
            # Killed, at any point of a turn.
            replica.turn(die=True)
            replicas.remove(replica)
        elif roll < 0.68 and len(replicas) < 4:
            born += 1
            replicas.append(Replica(place, born, capacity=capacity))
        for replica in replicas:
            if chance.random() < 0.4 or place.clock() - replica.turned > 2 * TURN:
                replica.turn()
        assert sum(replica.fleet.collects for replica in replicas) <= 1
        # What was written since the others last looked may be too much; then it goes.
        over_since = (over_since or place.clock()) if place.bytes > capacity else None
        assert over_since is None or place.clock() - over_since < 3 * LEASE
        assert place.bytes <= capacity + 6 * SIZE * len(replicas)
    # Whoever is left needs nothing but time.
    turns(place, replicas[:1], int(2 * LEASE / TURN) + 6)
    replicas[0].relist()
    turns(place, replicas[:1], int(LEASE / TURN) + 4)
    assert replicas[0].fleet.collects
    assert replicas[0].fleet.stats.replicas == 1
    there = {page.key for page in place.store.list()}
    assert all(not key.depth or key.parent in {other.key for other in there} for key in there), "orphans stay"
    assert place.bytes <= FULL * capacity
    assert replicas[0].index.total_bytes == place.bytes


def test_what_a_shared_index_needs_is_not_doomed() -> None:
    index = SharedIndex(20 * SIZE)
    use = Use(1, 0.0)
    chain, other = CHAINS[0], CHAINS[1]
    index.add_listed([Stored(key, SIZE) for key in (*chain[:3], *other)], SIZE, use)
    index.take_used()
    assert index.reserve(chain[3], SIZE, use) == []
    index.lock(other[:2])
    assert index.doom((*chain[2::-1], *other[::-1]), lambda key: key == other[3]) == [
        *chain[2::-1],
        *other[3::-1],
    ]
    index.check()
    assert index.doomed == {*other[4:]}
    assert index.match(other) == 4
    assert index.reserve(other[4], SIZE, use) is None
    assert index.total_bytes == 10 * SIZE
    index.end_doom(other)
    assert index.reserve(other[4], SIZE, use) == []
    index.check()


def test_what_two_listings_lack_is_gone(place: Place) -> None:
    first = Replica(place, 1, capacity=100 * SIZE)
    first.write(CHAINS[0])
    first.index.take_listing(first.index.compare([]), SIZE, first.use())
    # It may have been begun before they were stored.
    assert first.index.match(CHAINS[0]) == 6
    answer(place.store.delete, CHAINS[0][3])
    first.relist()
    first.relist()
    assert first.index.match(CHAINS[0]) == 3
    first.index.check()


def test_notes_are_whole_or_nothing() -> None:
    note = Note(b"12345678", 7, NOBODY, 3, SIZE, frozenset(CHAINS[0]), frozenset(CHAINS[1][:2]))
    claim = Claim(b"87654321", 9, 4, tuple(CHAINS[2]))
    assert parse_note(pack_note(note)) == note
    assert parse_claim(pack_claim(claim)) == claim
    for pack, parse in ((pack_note(note), parse_note), (pack_claim(claim), parse_claim)):
        spoilt: list[bytes] = [
            pack[:-1],
            pack[:40],
            b"",
            pack[:60] + b"x" + pack[61:],
            b"OTHERVER" + pack[8:],
        ]
        assert [parse(raw) for raw in spoilt] == [None] * 5
    assert parse_note(pack_claim(claim)) is None


def test_a_spoilt_claim_blocks_nobody(place: Place) -> None:
    first = Replica(place, 1, capacity=100 * SIZE)
    place.store.papers.kv.write(CLAIM_NAME, b"garbage").result()
    turns(place, [first], 2)
    assert first.fleet.collects


def test_a_store_that_does_not_answer_is_a_store_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Replica(place, 1, capacity=100 * SIZE)

    class Broken:
        def read(self, *_: object, **__: object) -> Callable[[], News]:
            raise ValueError("UNAVAILABLE: no network")

    monkeypatch.setattr(first.board, "_kv", Broken())
    with pytest.raises(StoreError, match="no network"):
        first.board.read()
