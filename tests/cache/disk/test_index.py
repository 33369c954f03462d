"""The disk index: what it promises about room, order, heads and tails, one case each."""

from __future__ import annotations

import pytest

from helpers.disk_pages import NAMESPACE, OTHER_NAMESPACE, sequence
from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.names import Stored
from tierax.cache.disk.page import NamespaceStats
from tierax.cache.page_keys import PageKey
from tierax.cache.policies.lru import LRU
from tierax.cache.policies.policy import Use
from tierax.cache.policies.registry import POLICIES, load_policy
from tierax.cache.policies.ttl import TTL


class Disk:
    """An index, and the store that it believes in: every page has 10 bytes."""

    def __init__(self, pages: int, policy: str = "lru") -> None:
        self.index = DiskIndex(10 * pages, load_policy(policy))
        self.files: set[PageKey] = set()
        self.tick = 0

    def put(self, keys: list[PageKey]) -> int:
        """Stores what there is room for, heads first; returns how many of `keys` that are."""
        self.tick += 1
        for place, key in enumerate(keys):
            if key in self.index:
                continue
            gone = self.index.reserve(key, 10, self.use)
            if gone is None:
                return place
            self.delete(gone)
            self.files.add(key)
            self.index.stored(key)
            self.index.check()
        return len(keys)

    def delete(self, keys: list[PageKey]) -> None:
        assert set(keys) <= self.files
        self.files -= set(keys)
        self.index.check()

    @property
    def use(self) -> Use:
        return Use(self.tick, float(self.tick))

    def listing(self) -> list[Stored]:
        return [Stored(key, 10) for key in self.files]


A, B, C = sequence(8, b"a"), sequence(8, b"b"), sequence(8, b"c")


def test_page_is_a_hit_once_it_is_stored_and_not_before() -> None:
    index = DiskIndex(100)
    assert index.reserve(A[0], 10) == []
    assert (A[0] in index, index.is_stored(A[0]), index.match(A)) == (True, False, 0)
    assert index.reserve(A[1], 10) == [], "a tail may be reserved while its head is being written"
    index.stored(A[1])
    assert index.match(A) == 0, "a stored tail is no hit before its head is"
    index.stored(A[0])
    assert index.match(A) == 2
    assert index.bytes == 20
    index.check()


def test_reserving_what_is_there_or_being_written_changes_nothing() -> None:
    index = DiskIndex(100)
    index.reserve(A[0], 10)
    assert index.reserve(A[0], 10) == []
    index.stored(A[0])
    assert index.reserve(A[0], 10) == []
    assert (index.bytes, len(index), index.stats.stored_pages) == (10, 1, 1)


def test_tail_without_head_is_refused() -> None:
    index = DiskIndex(100)
    assert index.reserve(A[1], 10) is None
    stranger = A[0]._replace(parent=B[0].key)
    assert index.reserve(stranger, 10) is None
    assert (len(index), index.stats.refused_pages) == (0, 2)


def test_never_above_the_capacity_and_the_oldest_goes_first() -> None:
    disk = Disk(pages=10)
    heads = [sequence(1, bytes([n]))[0] for n in range(25)]
    for head in heads:
        assert disk.put([head]) == 1
        assert disk.index.bytes <= 100
    assert disk.files == set(heads[-10:])
    assert disk.index.stats.evicted_pages == {"capacity": 15}
    assert disk.index.stats.evicted_bytes == 150


def test_tails_go_before_heads() -> None:
    disk = Disk(pages=10)
    disk.put(A)
    disk.put(B[:5])
    assert disk.index.match(A) == 5
    assert disk.index.match(B) == 5
    disk.put(B)
    assert (disk.index.match(A), disk.index.match(B)) == (2, 8)


def test_sequence_longer_than_the_disk_keeps_its_head() -> None:
    disk = Disk(pages=4)
    assert disk.put(A) == 4
    assert disk.index.match(A) == 4


def test_use_moves_a_sequence_to_the_back_of_the_queue() -> None:
    disk = Disk(pages=16)
    disk.put(A)
    disk.put(B)
    disk.tick += 1
    disk.index.touch(A, disk.use)
    disk.put(C[:4])
    assert (disk.index.match(A), disk.index.match(B)) == (8, 4)


def test_locked_pages_and_their_heads_stay() -> None:
    disk = Disk(pages=8)
    disk.put(A)
    disk.index.lock(A[5:6])
    assert disk.put(B) == 2
    assert disk.index.match(A) == 6
    disk.index.unlock(A[5:6])
    assert disk.put(B) == 8
    assert disk.index.match(A) == 0


def test_page_that_cannot_be_had_changes_nothing() -> None:
    disk = Disk(pages=4)
    disk.put(A[:4])
    disk.index.lock(A[1:2])
    assert disk.index.reserve(B[0], 30) is None
    assert disk.index.match(A) == 4, "the two free tails were not enough, so they stay"
    disk.index.check()
    assert disk.index.reserve(B[0], 50) is None, "larger than the disk"
    gone = disk.index.reserve(B[0], 20)
    assert gone == [A[3], A[2]]


def test_locks_are_counted() -> None:
    disk = Disk(pages=1)
    disk.put(A[:1])
    for _ in range(2):
        disk.index.lock(A[:1])
    disk.index.unlock(A[:1])
    assert disk.put(B[:1]) == 0
    disk.index.unlock(A[:1])
    assert disk.put(B[:1]) == 1
    with pytest.raises(ValueError, match="not locked"):
        disk.index.unlock(A[:1])


def test_lock_outlives_the_page_and_protects_it_when_it_comes_back() -> None:
    disk = Disk(pages=1)
    disk.put(A[:1])
    disk.index.lock(A[:1])
    disk.delete(disk.index.remove(A[0], "corrupt"))
    disk.put(A[:1])
    assert disk.put(B[:1]) == 0
    disk.index.unlock(A[:1])
    assert disk.put(B[:1]) == 1


def test_page_being_written_is_not_evicted_and_counts() -> None:
    index = DiskIndex(20)
    index.reserve(A[0], 10)
    index.reserve(B[0], 10)
    assert index.reserve(C[0], 10) is None
    index.stored(A[0])
    assert index.reserve(C[0], 10) == [A[0]]
    index.check()


def test_failed_write_takes_its_tails_along_and_may_be_tried_again() -> None:
    index = DiskIndex(100)
    for key in A[:3]:
        index.reserve(key, 10)
    index.stored(A[2])
    assert index.failed(A[0]) == [A[2], A[1], A[0]]
    index.check()
    assert (len(index), index.bytes) == (0, 0)
    assert index.stats.evicted_pages == {"failed": 3}
    assert index.reserve(A[0], 10) == []
    assert index.reserve(A[1], 10) is None, "the first write of it has not ended"
    index.stored(A[1])
    assert A[1] not in index, "it was given up, and is being deleted"
    assert index.reserve(A[1], 10) == []
    index.check()


def test_bad_page_goes_with_all_that_hangs_below_it() -> None:
    disk = Disk(pages=20)
    disk.put(A)
    branch = [*A[:4], *_continue(A[3], b"x", 3)]
    disk.put(branch)
    disk.put(B[:2])
    gone = disk.index.remove(A[2], "corrupt")
    assert set(gone) == {*A[2:], *branch[4:]}
    assert gone.index(A[7]) < gone.index(A[3]) < gone.index(A[2]), "tails first"
    disk.delete(gone)
    assert (disk.index.match(A), disk.index.match(branch), disk.index.match(B)) == (2, 2, 2)
    assert disk.index.remove(A[2], "corrupt") == []
    assert disk.index.stats.evicted_pages == {"corrupt": 9}


def test_namespaces_are_told_apart_and_cleared_alone() -> None:
    disk = Disk(pages=20)
    theirs = sequence(3, b"a", namespace=OTHER_NAMESPACE)
    disk.put(A)
    disk.put(B[:2])
    disk.put(theirs)
    assert disk.index.namespaces() == {
        NAMESPACE: NamespaceStats(10, 100, 8),
        OTHER_NAMESPACE: NamespaceStats(3, 30, 3),
    }
    disk.delete(disk.index.clear(NAMESPACE))
    assert disk.files == set(theirs)
    disk.delete(disk.index.clear())
    assert (disk.files, disk.index.bytes) == (set(), 0)
    assert disk.index.stats.evicted_pages == {"cleared": 13}


def test_cleared_write_that_ends_later_stays_out() -> None:
    index = DiskIndex(100)
    index.reserve(A[0], 10)
    assert index.clear() == [A[0]]
    index.stored(A[0])
    assert (len(index), index.match(A)) == (0, 0)
    index.check()


def test_start_takes_in_the_listing_whatever_its_order() -> None:
    index = DiskIndex(1000)
    assert index.add_listed([Stored(key, 10) for key in [*A[::-1], *B[:3]]]) == []
    assert (index.match(A), index.match(B), index.bytes) == (8, 3, 110)
    index.check()


def test_start_gives_orphans_and_contradictions_away() -> None:
    index = DiskIndex(1000)
    liar = A[1]._replace(depth=7)
    stranger = C[0]._replace(namespace=OTHER_NAMESPACE)
    listed = [Stored(key, 10) for key in (A[0], A[1], A[3], A[4], liar, stranger, B[1])]
    gone = index.add_listed(listed)
    assert set(gone) == {A[3], A[4], liar, stranger, B[1]}
    assert index.match(A) == 2
    assert index.stats.evicted_pages == {"orphan": 5}
    index.check()


def test_start_over_the_capacity_keeps_heads() -> None:
    index = DiskIndex(60)
    gone = index.add_listed([Stored(key, 10) for key in [*A, *B]])
    assert len(gone) == 10
    assert index.bytes == 60
    assert index.match(A) + index.match(B) == 6
    index.check()


def test_store_that_does_not_tell_sizes_is_counted_at_the_size_of_a_page() -> None:
    index = DiskIndex(1000)
    index.add_listed([Stored(key, None) for key in A], nbytes=11)
    assert index.bytes == 88


def test_listing_again_adds_what_others_wrote_and_changes_nothing_else() -> None:
    index = DiskIndex(1000)
    index.add_listed([Stored(key, 10) for key in A[:3]])
    index.reserve(A[3], 10)
    assert index.add_listed([Stored(key, 10) for key in [*A, *B[:1]]]) == []
    assert index.match(A) == 3, "the page being written is not a hit because a file of it is there"
    index.stored(A[3])
    assert (index.match(A), index.match(B)) == (8, 1)
    index.check()


def test_order_of_use_survives_a_restart() -> None:
    disk = Disk(pages=24)
    for keys in (A, B, C):
        disk.put(keys)
    disk.tick += 1
    disk.index.touch(A, disk.use)
    snapshot = disk.index.snapshot()
    late = sequence(2, b"late")
    after = DiskIndex(200)
    assert after.restore(snapshot)
    gone = after.add_listed([*disk.listing()[::-1], *(Stored(key, 10) for key in late)])
    assert gone == B[:1:-1][:6], "B was used longest ago"
    assert (after.match(A), after.match(B), after.match(C), after.match(late)) == (8, 2, 8, 2)
    after.touch(B, Use(1, 1.0))
    after.reserve(sequence(1, b"new")[0], 30)
    assert (after.match(B), after.match(C)) == (2, 5), "any new use is later than all before the restart"
    after.check()


@pytest.mark.parametrize("policy", [*(name for name in POLICIES if name != "ttl"), "ttl=1h"])
def test_every_policy_keeps_the_promises(policy: str) -> None:
    disk = Disk(pages=12, policy=policy)
    for turn in range(40):
        keys = sequence(4 + turn % 5, bytes([turn * 7 % 6]))
        stored = disk.put(keys)
        disk.index.touch(keys[:stored], disk.use)
        disk.index.check()
        assert disk.index.bytes <= 120
    snapshot = disk.index.snapshot()
    after = DiskIndex(120, load_policy(policy))
    assert after.restore(snapshot)
    assert after.add_listed(disk.listing()) == []
    after.check()


@pytest.mark.parametrize("damage", [b"", b"x", b"cut", b"flip", b"other"])
def test_missing_or_torn_snapshot_is_no_error(damage: bytes) -> None:
    disk = Disk(pages=8)
    disk.put(A)
    snapshot = disk.index.snapshot()
    torn = {b"cut": snapshot[:-5], b"flip": snapshot[:-1] + bytes([snapshot[-1] ^ 1])}.get(damage, damage)
    after = DiskIndex(80)
    assert not after.restore(torn)
    assert after.add_listed(disk.listing()) == []
    assert after.match(A) == 8


def test_little_free_space_shrinks_the_cache_and_it_grows_back() -> None:
    disk = Disk(pages=16)
    disk.put(A)
    disk.put(B)
    assert disk.index.keep_free(free=1000, floor=500) == []
    gone = disk.index.keep_free(free=450, floor=500)
    assert gone == A[:2:-1], "five pages, the oldest tails"
    disk.delete(gone)
    assert disk.put(C[:1]) == 1
    assert disk.index.bytes == 110, "one for one while space is short"
    assert disk.index.stats.evicted_pages == {"space_floor": 5, "capacity": 1}
    assert disk.index.keep_free(free=900, floor=500) == []
    disk.put(C[:6])
    assert disk.index.bytes == 160


def test_no_free_space_at_all_empties_the_cache_but_for_what_is_in_use() -> None:
    disk = Disk(pages=8)
    disk.put(A)
    disk.index.lock(A[:2])
    disk.delete(disk.index.keep_free(free=0, floor=10**6))
    assert disk.index.match(A) == 2
    assert disk.index.reserve(B[0], 10) is None
    disk.index.unlock(A[:2])
    disk.delete(disk.index.keep_free(free=0, floor=10**6))
    assert disk.index.bytes == 0


def test_what_lives_too_long_is_dropped_tails_first() -> None:
    index = DiskIndex(1000, TTL(10))
    for now, keys in ((0.0, A), (5.0, B)):
        for key in keys:
            index.reserve(key, 10, Use(int(now), now))
            index.stored(key)
    assert index.expire(9.9) == []
    assert index.expire(10.0) == A[::-1]
    index.check()
    assert (index.match(B), index.stats.evicted_pages) == (8, {"ttl": 8})


def test_unbounded_index_never_evicts() -> None:
    index = DiskIndex(None, LRU())
    index.add_listed([Stored(key, 10**15) for key in [*A, *B, *C]])
    assert index.reserve(sequence(1, b"d")[0], 10**15) == []
    index.check()


def _continue(parent: PageKey, start: bytes, pages: int) -> list[PageKey]:
    from tierax.cache.page_keys import chain

    keys = chain(parent.key, [start + bytes([n]) for n in range(pages)])
    return [
        PageKey(parent.namespace, key, keys[n - 1] if n else parent.key, parent.depth + 1 + n)
        for n, key in enumerate(keys)
    ]
