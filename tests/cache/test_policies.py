"""The policies: exact hits against independent references, and what each is for."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Iterator

import pytest

from helpers import flat_cache
from helpers.flat_cache import FlatCache, Item, mixed_trace
from tierax.cache.manager import CacheManager
from tierax.cache.policies.fifo import FIFO
from tierax.cache.policies.greedy_dual import GDSF, LFU
from tierax.cache.policies.lru import LRU
from tierax.cache.policies.registry import POLICIES, Use, load_policy
from tierax.cache.policies.s3fifo import S3FIFO
from tierax.cache.policies.slru import SLRU

Reference = Callable[[Iterable[int], int], Iterator[bool]]

HITS = {
    "lru": (LRU, flat_cache.reference_lru, 1176),
    "fifo": (FIFO, flat_cache.reference_fifo, 1104),
    "lfu": (LFU, flat_cache.reference_greedy_dual, 1261),
    "gdsf": (GDSF, flat_cache.reference_greedy_dual, 1261),
    "slru": (SLRU, flat_cache.reference_slru, 1349),
    "s3fifo": (S3FIFO, flat_cache.reference_s3fifo, 1342),
}


@pytest.mark.parametrize("name", HITS)
def test_golden_hits_on_a_fixed_trace(name: str) -> None:
    make, reference, hits = HITS[name]
    trace = mixed_trace(seed=7)
    ours = FlatCache(make(), capacity=50).run(trace)
    assert ours == list(reference(trace, 50))
    assert sum(ours) == hits


@pytest.mark.parametrize("name", HITS)
@pytest.mark.parametrize("capacity", [1, 7, 20])
def test_hits_are_the_references_for_other_sizes_too(name: str, capacity: int) -> None:
    make, reference, _ = HITS[name]
    trace = mixed_trace(seed=capacity, length=900, names=60)
    assert FlatCache(make(), capacity).run(trace) == list(reference(trace, capacity))


def test_gdsf_against_its_reference_with_depths() -> None:
    trace = mixed_trace(seed=3, length=900, names=60)
    depth = {name: 1 + name * 37 % 400 for name in trace}
    cache = FlatCache(GDSF(even_depth=100), capacity=20)
    ours = [cache.access(name, depth[name]) for name in trace]
    cost = {name: 1 + depth[name] / 100 for name in trace}
    assert ours == list(flat_cache.reference_greedy_dual(trace, 20, cost))


@pytest.mark.parametrize(("name", "kept"), [("lru", 0), ("fifo", 0), ("slru", 40), ("s3fifo", 40)])
def test_a_scan_pushes_out_what_is_in_use_or_not(name: str, kept: int) -> None:
    """40 things used four times each, then 500 used once, in a cache of 50."""
    cache = FlatCache(load_policy(name), capacity=50)
    cache.run(list(range(40)) * 4)
    cache.run(range(1000, 1500))
    assert sum(cache.items.keys() >= {name} for name in range(40)) == kept


@pytest.mark.parametrize("name", ["lfu", "gdsf"])
def test_old_stars_die(name: str) -> None:
    """A star with 20 uses outlives 100 newcomers, but not 2,000."""
    cache = FlatCache(load_policy(name), capacity=10)
    cache.run([0] * 20)
    cache.run(range(100, 200))
    assert 0 in cache.items
    cache.run(range(1000, 3000))
    assert 0 not in cache.items


def test_fifo_does_not_care_for_uses() -> None:
    cache = FlatCache(FIFO(), capacity=3)
    cache.run([1, 2, 3, 1, 1, 1, 4])
    assert set(cache.items) == {2, 3, 4}


def test_slru_demotes_what_was_protected_longest_ago() -> None:
    cache = FlatCache(SLRU(), capacity=5)
    cache.run([1, 2, 3, 4, 5] * 2)
    # Four of the five may be protected: 1 goes back on probation when room is needed, where it is alone.
    cache.run([6])
    assert set(cache.items) == {2, 3, 4, 5, 6}
    cache.run([7])
    assert set(cache.items) == {2, 3, 4, 5, 7}


def test_s3fifo_remembers_what_has_just_gone() -> None:
    cache = FlatCache(S3FIFO(), capacity=10)
    cache.run(range(12))
    assert 0 not in cache.items
    cache.run([0])
    cache.run(range(100, 140))
    assert 0 in cache.items, "it came back while it was a ghost, and is in the main queue"
    assert 3 not in cache.items
    cache.run(range(200, 300))
    cache.run([3])
    cache.run(range(300, 340))
    assert 3 not in cache.items, "it came back too late"


def test_s3fifo_forgets_ghosts_in_the_measure_of_the_cache() -> None:
    policy = S3FIFO()
    cache = FlatCache(policy, capacity=10)
    cache.run(range(1000))
    assert len(policy._ghosts) == policy._ghost_pages == 9


def test_gdsf_keeps_what_costs_more() -> None:
    """Uses being equal, deeper pages stay; twice the uses make up for half the cost."""
    cache = FlatCache(GDSF(even_depth=10), capacity=2)
    cache.access("shallow", depth=1)
    cache.access("deep", depth=50)
    cache.access("new", depth=20)
    assert set(cache.items) == {"deep", "new"}
    for _ in range(3):
        cache.access("new", depth=20)
    cache.access("last", depth=60)
    assert set(cache.items) == {"new", "last"}


def test_ttl_expires_after_the_time_without_use() -> None:
    cache = FlatCache(load_policy("ttl=60s"), capacity=3)
    for name, now in [("a", 0.0), ("b", 10.0), ("a", 20.0), ("c", 30.0)]:
        cache.access(name, now=now)
    gone: list[tuple[float, object]] = []
    for now in (69.0, 70.0, 79.9, 90.0, 200.0):
        while (item := cache.queue.expired(now)) is not None:
            cache.drop(item)
            gone.append((now, item.identity))
    assert gone == [(70.0, "b"), (90.0, "a"), (90.0, "c")]
    # Before their time it is LRU.
    for name, now in [("a", 200.0), ("b", 200.5), ("c", 201.0), ("a", 202.0), ("d", 203.0)]:
        cache.access(name, now=now)
    assert set(cache.items) == {"a", "c", "d"}


@pytest.mark.parametrize(
    ("option", "seconds"), [("5s", 5.0), ("1.5m", 90.0), ("1h", 3600.0), ("2d", 172800.0)]
)
def test_units_of_time(option: str, seconds: float) -> None:
    item = Item("a")
    policy = load_policy(f"ttl={option}")
    policy.touch(item, Use(1, 1000.0))
    assert policy.expires(item) == 1000.0 + seconds


@pytest.mark.parametrize(("name", "hits"), [("hazard", 1282), ("hazard=cold", 1264), ("adaptive", 1278)])
def test_golden_hits_of_what_learns(name: str, hits: int) -> None:
    """No reference but itself: what it did when it was measured, an access a second."""
    assert sum(FlatCache(load_policy(name), capacity=50).run(mixed_trace(seed=7))) == hits


def conversations(seed: int, requests: int = 1500) -> list[tuple[float, array[int]]]:
    """Arrivals and tokens. One prompt in fifty begins a conversation that goes on, a minute later each time; the others never
    come back, and are known by their length.
    """
    rng = random.Random(seed)
    fresh = iter(range(1, 10_000_000))
    waiting: list[tuple[float, list[int]]] = []
    found: list[tuple[float, array[int]]] = []
    for number in range(requests):
        now = float(number)
        if waiting and waiting[0][0] <= now:
            _, tokens = waiting.pop(0)
            tokens = [*tokens, next(fresh)]
        else:
            goes_on = rng.random() < 0.02
            tokens = [0, *(next(fresh) for _ in range(5 if goes_on else 20))]
        if len(tokens) < 20:
            waiting.append((now + 60, tokens))
        found.append((now, array("i", tokens)))
    return found


def served(name: str, requests: list[tuple[float, array[int]]], pages: int) -> int:
    """Pages that were hit, of one token each, by the production cache under a policy."""
    arrival = [0.0]
    cache = CacheManager(pages, 1, load_policy(name), clock=lambda: arrival[0])
    hits = 0
    for arrival[0], tokens in requests:
        lease = cache.open(b"", tokens, len(tokens))
        hits += lease.num_shared
        assert cache.grow(lease, len(tokens))
        cache.commit(lease, tokens, len(tokens))
        cache.release(lease)
    cache.check()
    return hits


def test_hazard_learns_what_comes_back_and_when() -> None:
    """LRU holds 400 pages for twenty seconds or so, what comes back does so after sixty: it hits the head alone."""
    requests = conversations(seed=5)
    lru, cold = served("lru", requests, 400), served("hazard=cold", requests, 400)
    everything = served("lru", requests, 100_000)
    assert lru < 0.5 * everything
    assert cold > 0.95 * everything


def test_hazard_drops_ends_that_never_come_back_before_whole_paths() -> None:
    """Every prompt's last page is replaced when the conversation goes on, so it is the first to go, a page at a time."""
    moments = itertools.count()
    cache = CacheManager(60, 1, load_policy("hazard=cold"), clock=lambda: 0.1 * next(moments))

    def ask(tokens: list[int]) -> int:
        prompt = array("i", tokens)
        lease = cache.open(b"", prompt, len(prompt))
        hit = lease.num_shared
        assert cache.grow(lease, len(prompt))
        cache.commit(lease, prompt, len(prompt))
        cache.release(lease)
        cache.check()
        return hit

    def known(tokens: list[int]) -> int:
        return cache.match_length(b"", array("i", tokens))

    for first in range(0, 6_000, 100):
        ask([first, first + 1, first + 2, first + 99])
        assert ask([first, first + 1, first + 2, first + 3, first + 98]) == 3
    cache.clear()
    paths = [[base + i for i in range(6)] for base in range(10_000, 20_000, 1_000)]
    for path in paths:
        assert ask(path) == 0
    ask([30_000 + i for i in range(5)])
    assert [known(path) for path in paths] == [5] * 5 + [6] * 5


ALL = [*(name for name in POLICIES if name != "ttl"), "ttl=1h"]


@pytest.mark.parametrize("name", ALL)
def test_both_halves_of_a_run_keep_its_place(name: str) -> None:
    policy = load_policy(name)
    cache = FlatCache(policy, capacity=9)
    for i in range(3):
        cache.access(i, depth=8)
    for i in range(3):
        cache.access(i, depth=8)
    run = cache.items[1]
    run.size = 8
    place = (policy.lane(run), policy.priority(run), policy.expires(run))
    # It is cut while it waits: the tail stays where it was, and its head may go once the tail has gone.
    head, run.size = Item("head", end=5, size=5, rank=run.rank), 3
    assert (policy.lane(run), policy.priority(run), policy.expires(run)) == place
    later = Use(100, 100.0)
    assert [cache.queue.pop(later).identity for _ in range(2)] == [0, 1]
    cache.queue.add(head)
    assert [cache.queue.pop(later).identity for _ in range(2)] == ["head", 2]
    # Both go on from what the run was worth, each on its own.
    rank = head.rank
    policy.touch(run, Use(101, 101.0))
    assert head.rank == rank


@pytest.mark.parametrize("name", [name for name in ALL if name != "fifo"])
def test_a_shared_head_outlives_the_tails(name: str) -> None:
    """Prefix-aware: a head that is part of every hit stays, though it came first, while the tails pass through."""
    cache = FlatCache(load_policy(name), capacity=10)
    hits = 0
    for path in range(200):
        hits += cache.access("head")
        assert not cache.access(f"tail {path}")
    assert hits == 199


@pytest.mark.parametrize("name", ALL)
def test_policies_do_not_share_state(name: str) -> None:
    trace = mixed_trace(seed=1, length=600, names=50)
    alone = FlatCache(load_policy(name), capacity=10).run(trace)
    one, other = FlatCache(load_policy(name), capacity=10), FlatCache(load_policy(name), capacity=10)
    hits: list[bool] = []
    for index, access in enumerate(trace):
        hits.append(one.access(access))
        other.access(index)
    assert hits == alone
