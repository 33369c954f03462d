"""`adaptive`: it leaves LRU for whoever surely hits more, stays where nobody does, and comes back."""

from __future__ import annotations

import random

import pytest

from helpers.flat_cache import FlatCache, Item
from tierax.cache.policies import adaptive
from tierax.cache.policies.adaptive import Adaptive
from tierax.cache.policies.registry import load_policy

CAPACITY = 60


def scanned(rng: random.Random, length: int = 4_000) -> list[int]:
    """Every other access is of a scan, which pushes out LRU's favourites."""
    skewed = [int(400 * rng.random() ** 4) for _ in range(length // 2)]
    return [name for at, name in enumerate(skewed) for name in (name, 5_000 + at)]


def drifting(rng: random.Random, length: int = 6_000) -> list[int]:
    """Favourites that move on, so that what was used last is what is used next."""
    return [100_000 + at // 4 + int(40 * rng.random()) for at in range(length)]


def hits(name: str, trace: list[int]) -> list[bool]:
    return FlatCache(load_policy(name), CAPACITY).run(trace)


@pytest.mark.parametrize("seed", range(3))
def test_it_follows_whoever_hits(seed: int) -> None:
    trace = scanned(random.Random(seed), 6_000)
    lru, best, found = (hits(name, trace) for name in ("lru", "s3fifo", "adaptive"))
    assert sum(found) > sum(lru) + 0.7 * (sum(best) - sum(lru))
    assert sum(found[3_000:]) > 0.94 * sum(best[3_000:]), "once it knows, it hits about as the best does"


@pytest.mark.parametrize("seed", range(3))
def test_where_lru_is_the_best_it_is_lru(seed: int) -> None:
    trace = drifting(random.Random(seed))
    assert hits("adaptive", trace) == hits("lru", trace)


@pytest.mark.parametrize("seed", range(3))
def test_where_none_is_better_chance_makes_it_leave_seldom(seed: int) -> None:
    """Every name is as likely as every other, whatever happened before."""
    rng = random.Random(seed)
    trace = [int(400 * rng.random()) for _ in range(6_000)]
    assert sum(hits("adaptive", trace)) >= 0.99 * sum(hits("lru", trace))


@pytest.mark.parametrize("seed", range(3))
def test_it_comes_back_to_lru_when_the_lead_is_gone(seed: int) -> None:
    rng = random.Random(seed)
    trace = scanned(rng) + drifting(rng)
    found, lru = hits("adaptive", trace), hits("lru", trace)
    assert sum(found[:4_000]) > 1.2 * sum(lru[:4_000])
    assert found[-4_000:] == lru[-4_000:]


def test_few_large_hits_prove_nothing_many_small_ones_do() -> None:
    policy = Adaptive()
    policy._leads, policy._squares = [0.0, 300.0, 0.0, 0.0], [0.0, 3 * 100.0**2, 0.0, 0.0]
    policy._decide()
    assert policy._chosen == 0, "three runs of 100 pages are 1.7 standard deviations"
    policy._leads, policy._squares = [0.0, 300.0, 0.0, 0.0], [0.0, 300 * 1.0**2, 0.0, 0.0]
    policy._decide()
    assert policy._chosen == 1
    policy._leads[1] = 1.0
    policy._decide()
    assert policy._chosen == 1, "who is in charge need not prove it again"
    policy._leads[1] = -1.0
    policy._decide()
    assert policy._chosen == 0


def test_in_a_large_tier_ghost_caches_hold_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "MOST_FOLLOWED", 16)
    policy = Adaptive()
    cache = FlatCache(policy, CAPACITY)
    cache.run(scanned(random.Random(1)))
    assert policy._one_in >= 4
    for ghost in policy._ghosts:
        assert 0 < len(ghost) <= 17
        ghost._queue.check(ghost._items.values())
        assert all(adaptive._followed(name, policy._one_in) for name in ghost._items)
    assert {type(item) for item in cache.items.values()} == {Item}
