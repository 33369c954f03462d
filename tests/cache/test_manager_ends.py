"""Where a manager's pages end: aborted, void, cleared, of another tenant; and that `check` sees damage."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers.manager_calls import counts, held, serve, span
from tierax.cache.leases import Lease
from tierax.cache.manager import CacheManager
from tierax.cache.policies.registry import Use
from tierax.cache.radix_tree import DEVICE


def test_abort_gives_everything_back() -> None:
    cache = CacheManager(num_pages=8, page_size=4)
    tokens = span(0, 20)
    lease = cache.open(b"", tokens, 19)
    assert cache.grow(lease, 20)
    cache.release(lease)
    assert counts(cache) == (8, 0, 0)
    assert not cache.tiers.tree.roots
    cache.check()


def test_void_leases_are_refused() -> None:
    cache = CacheManager(num_pages=8, page_size=4)
    tokens = span(0, 8)
    lease = cache.open(b"", tokens, 7)
    assert cache.grow(lease, 8)
    cache.release(lease)
    for use in (
        lambda: cache.release(lease),
        lambda: cache.grow(lease, 8),
        lambda: cache.commit(lease, tokens, 8),
        lambda: cache.extend(lease, tokens, 8),
    ):
        with pytest.raises(ValueError, match="the lease is void"):
            use()
    assert counts(cache) == (8, 0, 0)
    cache.check()


def test_commit_of_what_is_not_there_is_refused() -> None:
    cache = CacheManager(num_pages=8, page_size=4)
    lease = cache.open(b"", span(0, 8), 7)
    assert cache.grow(lease, 4)
    with pytest.raises(ValueError, match="commit of 8 tokens, but 8 are known and 1 pages held"):
        cache.commit(lease, span(0, 8), 8)
    with pytest.raises(ValueError, match="commit of 4 tokens, but 3 are known"):
        cache.commit(lease, span(0, 3), 4)
    cache.check([lease])
    with pytest.raises(ValueError, match="page_size 0"):
        CacheManager(num_pages=8, page_size=0)


def test_tenants_share_nothing() -> None:
    """With a positive control: the same prompts do hit within a tenant."""
    cache = CacheManager(num_pages=64, page_size=4)
    tokens = span(0, 13)
    order = [b"salt:s1", b"salt:s1", b"salt:s2", b"", b"adapter:s1", b"", b"salt:s2"]
    assert [serve(cache, tokens, name) for name in order] == [0, 12, 0, 0, 0, 12, 12]
    assert cache.match_length(b"salt:s3", tokens) == 0
    assert sorted(cache.tiers.tree.roots) == [b"", b"adapter:s1", b"salt:s1", b"salt:s2"], (
        "a look-up leaves no trace"
    )
    pages = [set[int]() for _ in order]
    for name, mine in zip(order, pages, strict=True):
        lease = cache.open(name, tokens, 12)
        mine.update(lease.pages)
        cache.release(lease)
    assert pages[0] == pages[1]
    assert len(set.union(*pages)) == 12, "four namespaces, three pages each, none in common"


def test_emptied_namespaces_are_forgotten() -> None:
    cache = CacheManager(num_pages=4, page_size=2)
    for tenant in range(50):
        serve(cache, span(0, 8), b"tenant %d" % tenant)
    assert list(cache.tiers.tree.roots) == [b"tenant 49"]
    waiting = cache.open(b"tenant 49", span(50, 4), 3)
    cache.clear()
    assert list(cache.tiers.tree.roots) == [b"tenant 49"], "a lease keeps its namespace"
    assert cache.grow(waiting, 4)
    cache.commit(waiting, span(50, 4), 4)
    assert cache.match_length(b"tenant 49", span(50, 4)) == 4
    cache.check([waiting])


def test_clear_drops_all_but_what_is_in_use() -> None:
    cache = CacheManager(num_pages=16, page_size=2)
    tokens, other = span(0, 8), span(50, 8)
    serve(cache, tokens)
    serve(cache, other)
    lease = cache.open(b"", tokens, 4)
    cache.clear()
    assert counts(cache) == (14, 0, 2)
    assert (held(cache, tokens), held(cache, other)) == (4, 0)
    assert cache.stats.evicted_pages == 0, "a flush is no eviction"
    cache.check([lease])
    cache.release(lease)
    cache.clear()
    assert counts(cache) == (16, 0, 0)
    cache.check()


def test_reset_voids_every_lease() -> None:
    cache = CacheManager(num_pages=8, page_size=2)
    tokens = span(0, 8)
    serve(cache, tokens)
    leases = [cache.open(b"", tokens, 7), cache.open(b"x", tokens, 7)]
    assert cache.grow(leases[1], 8)
    cache.reset()
    assert counts(cache) == (8, 0, 0)
    cache.check()
    for lease in leases:
        assert (lease.pages, lease.num_shared) == ([], 0)
        with pytest.raises(ValueError, match="the cache was reset"):
            cache.release(lease)
    assert cache.stats.inserted_pages == 4, "counters only grow"
    assert [serve(cache, tokens), serve(cache, tokens)] == [0, 6]


def test_disabled_cache_shares_nothing() -> None:
    cache = CacheManager(num_pages=8, page_size=2, enabled=False)
    tokens = span(0, 8)
    assert [serve(cache, tokens), serve(cache, tokens)] == [0, 0]
    lease = cache.open(b"", tokens, 7)
    assert cache.grow(lease, 8)
    cache.commit(lease, tokens, 8)
    assert (lease.num_shared, counts(cache), held(cache, tokens)) == (0, (4, 0, 4), 0)
    other = cache.open(b"", tokens, 7)
    assert cache.extend(other, tokens, 7) == 0
    cache.check([lease, other])


def _steal_page(cache: CacheManager, lease: Lease) -> None:
    lease.pages[-1] = lease.pages[0]


def _lose_lock(cache: CacheManager, lease: Lease) -> None:
    next(cache.tiers.tree.nodes()).runs[DEVICE].lock -= 1


def _free_live_page(cache: CacheManager, lease: Lease) -> None:
    cache.device.pool.give_back(lease.pages[:1])


def _swap_table(cache: CacheManager, lease: Lease) -> None:
    lease.pages[0], lease.pages[1] = lease.pages[1], lease.pages[0]


def _cut_key(cache: CacheManager, lease: Lease) -> None:
    del next(cache.tiers.tree.nodes()).key[-1:]


def _forget_leaf(cache: CacheManager, lease: Lease) -> None:
    cache.device.queue.pop(Use(0, 0.0))


FAULTS: Sequence = [_steal_page, _lose_lock, _free_live_page, _swap_table, _cut_key, _forget_leaf]


@pytest.mark.parametrize("fault", FAULTS)
def test_check_sees_every_kind_of_damage(fault) -> None:
    cache = CacheManager(num_pages=16, page_size=2)
    tokens = span(0, 8)
    serve(cache, span(50, 8))
    lease = cache.open(b"", tokens, 7)
    assert cache.grow(lease, 9)
    cache.commit(lease, tokens, 8)
    cache.check([lease])
    with pytest.raises(AssertionError):
        cache.check()
    fault(cache, lease)
    with pytest.raises(AssertionError):
        cache.check([lease])
