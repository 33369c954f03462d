"""The eviction queue alone: order, lanes, spares, expiry, lazy deletion, bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.flat_cache import Item
from tierax.cache.eviction_queue import MOST_SPARES, EvictionQueue
from tierax.cache.policies.lru import LRU
from tierax.cache.policies.registry import Evictable, EvictionPolicy, Use
from tierax.cache.policies.ttl import TTL

NOW = Use(1000, 1000.0)
Rank = tuple[int, int, int, int | None]


class ByRank(EvictionPolicy):
    """Does what a `Rank` says: lane, priority, spares left, expiry."""

    lanes = 3

    def __init__(self, order: Sequence[int] = (0,)) -> None:
        self.order, self.spared = order, 0
        self.seen: list[list[int]] = []

    def touch(self, item: Evictable, use: Use) -> None:
        item.rank = item.rank or (0, use.tick, 0, None)

    def priority(self, item: Evictable) -> int:
        return item.rank[1]

    def lane(self, item: Evictable) -> int:
        return item.rank[0]

    def choose(self, firsts: Sequence[Evictable | None], pages: Sequence[int], use: Use) -> int:
        self.seen.append(list(pages))
        return self.order[len(self.seen) % len(self.order) - 1]

    def spare(self, item: Evictable, use: Use) -> bool:
        lane, priority, spares, expires = item.rank
        if spares == 0:
            return False
        self.spared += 1
        item.rank = (lane, priority + use.tick, spares - 1, expires)
        return True

    def expires(self, item: Evictable) -> float | None:
        return item.rank[3]


def item(name: str, rank: object, end: int = 1, size: int = 1) -> Item:
    return Item(name, end, size, rank)


def filled(policy: EvictionPolicy, items: list[Item]) -> EvictionQueue[Item]:
    queue: EvictionQueue[Item] = EvictionQueue(policy)
    for one in items:
        queue.add(one)
    queue.check(items)
    return queue


def test_least_rank_then_deepest_then_first_come() -> None:
    depths = [9, 1, 3, 1, 1]
    items = [
        item(str(i), rank, end) for i, (rank, end) in enumerate(zip([2, 1, 1, 1, 0], depths, strict=True))
    ]
    queue = filled(LRU(), items)
    assert "".join(str(queue.pop(NOW).identity) for _ in items) == "42130"
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop(NOW)


def test_discarded_and_renewed_entries() -> None:
    a, b, c = items = [item("a", 1), item("b", 2), item("c", 3)]
    queue = filled(LRU(), items)
    queue.discard(b)
    queue.discard(b)
    queue.discard(a)
    a.rank = 4
    queue.add(a)
    queue.check([a, c])
    assert [queue.pop(NOW), queue.pop(NOW)] == [c, a]


def test_an_item_does_not_wait_twice() -> None:
    a = item("a", 1)
    with pytest.raises(AssertionError, match="waits already"):
        filled(LRU(), [a]).add(a)


def test_check_finds_what_has_changed_behind_its_back() -> None:
    a, b = item("a", 1), item("b", 2)
    queue = filled(LRU(), [a, b])
    with pytest.raises(AssertionError, match="exactly the evictable"):
        queue.check([a])
    a.rank = 5
    with pytest.raises(AssertionError, match="stale priority"):
        queue.check([a, b])
    a.rank, a.size = 1, 2
    with pytest.raises(AssertionError, match="grown"):
        queue.check([a, b])


def test_a_run_that_loses_its_head_while_it_waits_keeps_its_place() -> None:
    run, other = item("run", 1, end=8, size=8), item("other", 2)
    queue = filled(LRU(), [run, other])
    run.size = 3
    queue.check([run, other])
    assert queue.pop(NOW) is run
    queue.check([other])


@pytest.mark.parametrize("kind", ["lru", "ttl"])
def test_dead_entries_do_not_pile_up(kind: str) -> None:
    policy = LRU() if kind == "lru" else TTL(60.0)
    items = [item(str(i), None) for i in range(5)]
    for one in items:
        policy.touch(one, Use(0, 0.0))
    queue = filled(policy, items)
    for tick in range(1, 10_000):
        one = items[tick % 5]
        queue.discard(one)
        policy.touch(one, Use(tick, float(tick)))
        queue.add(one)
    assert sum(map(len, queue._lanes)) <= 2 * 5 + 64
    assert len(queue._expiries) <= 2 * 5 + 64
    queue.check(items)
    assert [queue.pop(NOW) for _ in items] == items


def test_the_policy_chooses_the_lane_and_is_told_the_pages() -> None:
    policy = ByRank(order=[1, 2, 1])
    items = [
        item("a", (0, 5, 0, None), size=4),
        item("b", (1, 9, 0, None), size=2),
        item("c", (2, 1, 0, None), size=1),
        item("d", (0, 3, 0, None), size=8),
    ]
    queue = filled(policy, items)
    assert [str(queue.pop(NOW).identity) for _ in items] == ["b", "c", "d", "a"], "an empty lane passes on"
    assert policy.seen == [[12, 2, 1], [12, 0, 1], [12, 0, 0], [4, 0, 0]]


def test_spared_items_come_back_with_their_new_rank() -> None:
    a, b, c = items = [item("a", (0, 1, 1, None)), item("b", (0, 2, 0, None)), item("c", (0, 3, 2, None))]
    queue = filled(ByRank(), items)
    assert queue.pop(Use(10, 0.0)) is b, "a was spared until 11"
    assert queue.pop(Use(10, 0.0)) is a, "c was spared until 13"
    queue.check([c])
    assert queue.pop(Use(10, 0.0)) is c
    assert c.rank == (0, 23, 0, None)


def test_a_policy_that_always_spares_is_overruled() -> None:
    policy = ByRank()
    items = [item(str(i), (0, i, 10**9, None)) for i in range(3)]
    queue = filled(policy, items)
    gone = queue.pop(Use(10, 0.0))
    assert gone in items
    assert policy.spared == MOST_SPARES
    queue.check([one for one in items if one is not gone])


def test_expired_items_leave_in_the_order_of_their_times() -> None:
    late, never, early, deep = items = [
        item("late", (0, 1, 0, 30.0)),
        item("never", (1, 2, 0, None)),
        item("early", (2, 3, 0, 10.0), end=1),
        item("deep", (0, 4, 0, 10.0), end=2),
    ]
    queue = filled(ByRank(), items)
    assert queue.expired(9.99) is None
    queue.discard(late)
    late.rank = (0, 1, 0, 40.0)
    queue.add(late)
    assert queue.expired(30.0) is deep
    queue.check([late, never, early])
    assert [queue.expired(30.0), queue.expired(30.0)] == [early, None]
    assert queue.expired(40.0) is late
    assert queue.expired(1e9) is None
    queue.check([never])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "discard", "pop", "expired"]),
        st.integers(0, 7),
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 2), st.none() | st.integers(0, 9)),
        st.integers(1, 4),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_the_queue_is_a_sorted_list(
    steps: list[tuple[str, int, Rank, int]],
) -> None:
    """Against a list, in the order of entry, that is searched anew for every question."""
    queue: EvictionQueue[Item] = EvictionQueue(ByRank())
    model: list[tuple[Item, Rank]] = []

    def order(entry: tuple[Item, Rank]) -> tuple[int, int, int, int]:
        lane, priority, _, _ = entry[1]
        return lane, priority, -entry[0].end, model.index(entry)

    for verb, which, rank, end in steps:
        if verb == "add":
            model.append((Item(which, end, 1, rank), rank))
            queue.add(model[-1][0])
        elif verb == "discard" and model:
            queue.discard(model.pop(which % len(model))[0])
        elif verb == "pop" and model:
            victim = min(model, key=order)
            while victim[1][2]:
                lane, priority, spares, expires = victim[1]
                model.remove(victim)
                model.append((victim[0], (lane, priority + 2, spares - 1, expires)))
                victim = min(model, key=order)
            model.remove(victim)
            popped = queue.pop(Use(2, 0.0))
            assert popped is victim[0]
            assert popped.rank == victim[1]
        elif verb == "expired":
            due = [
                (rank[3], -held.end, index)
                for index, (held, rank) in enumerate(model)
                if rank[3] is not None and rank[3] <= which
            ]
            gone = queue.expired(float(which))
            assert gone is (model[min(due)[2]][0] if due else None)
            if due:
                del model[min(due)[2]]
        queue.check(held for held, _ in model)
        assert all(held.rank == rank for held, rank in model)
