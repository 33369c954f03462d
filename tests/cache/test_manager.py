"""The cache manager through its public face, with exact counts after each step."""

from __future__ import annotations

import pytest

from helpers.manager_calls import counts, held, ids, serve, span
from tierax.cache.manager import CacheManager


def test_life_of_one_request() -> None:
    cache = CacheManager(num_pages=10, page_size=4)
    tokens = span(0, 11)
    assert cache.capacity_tokens == 40
    lease = cache.open(b"", tokens, 10)
    assert (lease.pages, lease.num_shared, counts(cache)) == ([], 0, (10, 0, 0))
    assert cache.grow(lease, 11)
    assert (lease.pages, lease.num_shared, counts(cache)) == ([0, 1, 2], 0, (7, 0, 3))
    cache.commit(lease, tokens, 7)
    assert lease.num_shared == 1, "only whole pages are shared"
    cache.commit(lease, tokens, 11)
    assert (lease.num_shared, cache.stats.inserted_pages) == (2, 2)
    assert cache.grow(lease, 12), "the page for token 12 is there already"
    assert (lease.pages, cache.available()) == ([0, 1, 2], 7)
    cache.check([lease])
    cache.release(lease)
    assert counts(cache) == (8, 2, 0)
    assert cache.available() == 10
    assert held(cache, tokens) == 8
    cache.check()


@pytest.mark.parametrize(("page_size", "expected"), [(4, 4), (1, 7), (3, 6), (16, 0)])
def test_full_hit_leaves_a_token_to_compute(page_size: int, expected: int) -> None:
    cache = CacheManager(num_pages=16, page_size=page_size)
    tokens = span(0, 8)
    assert [serve(cache, tokens) for _ in range(3)] == [0, expected, expected]
    assert cache.stats.inserted_pages == 8 // page_size, "the last page is computed again, not inserted again"


def test_next_turn_hits_prompt_and_answer() -> None:
    cache = CacheManager(num_pages=64, page_size=4)
    first = span(0, 30)
    assert serve(cache, first) == 0
    assert serve(cache, first + span(100, 12)) == 28
    assert serve(cache, first[:17] + span(200, 9)) == 16
    assert held(cache, first) == 28, "a branch leaves the trunk whole"


def test_limit_cuts_the_match_in_the_middle_of_a_run() -> None:
    cache = CacheManager(num_pages=8, page_size=2)
    tokens = span(0, 10)
    serve(cache, tokens)
    lease = cache.open(b"", tokens, 7)
    assert (lease.num_shared, counts(cache)) == (3, (3, 2, 3))
    longer = cache.open(b"", tokens, 100)
    assert (longer.num_shared, counts(cache)) == (5, (3, 0, 5))
    cache.check([lease, longer])
    cache.release(longer)
    assert counts(cache) == (3, 2, 3)
    cache.release(lease)
    assert counts(cache) == (3, 5, 0)
    cache.check()


def test_splitting_a_locked_run_locks_both_halves() -> None:
    cache = CacheManager(num_pages=6, page_size=2)
    tokens = span(0, 8)
    first = cache.open(b"", tokens, 7)
    assert cache.grow(first, 8)
    cache.commit(first, tokens, 8)
    second = cache.open(b"", tokens[:4] + ids(50, 51), 5)
    assert (second.num_shared, second.pages) == (2, first.pages[:2])
    cache.check([first, second])
    cache.release(first)
    assert counts(cache) == (2, 2, 2), "only the half that nobody else holds can go"
    assert not cache.grow(second, 14)
    assert cache.grow(second, 12)
    assert held(cache, tokens) == 4
    cache.check([second])
    cache.release(second)
    assert counts(cache) == (4, 2, 0)
    cache.check()


def test_duplicates_are_remapped_before_they_are_freed() -> None:
    cache = CacheManager(num_pages=9, page_size=4)
    tokens = span(0, 12)
    leases = [cache.open(b"", tokens, 11) for _ in range(2)]
    for lease in leases:
        assert cache.grow(lease, 13)
    first, second = leases
    own = second.pages[:]
    cache.commit(first, tokens, 12)
    cache.commit(second, tokens, 12)
    assert second.pages == [*first.pages[:3], own[3]]
    assert (cache.stats.duplicate_pages, cache.stats.inserted_pages, cache.free) == (3, 3, 4)
    cache.check(leases)
    third = cache.open(b"", span(100, 16), 15)
    assert cache.grow(third, 16)
    assert set(third.pages) == {*own[:3], 8}, "the freed duplicates went to the next request"
    cache.check([*leases, third])
    assert not set(third.pages) & {*first.pages, *second.pages}


def test_duplicate_of_a_part_then_a_branch() -> None:
    cache = CacheManager(num_pages=20, page_size=2)
    trunk = span(0, 6)
    one, two = trunk + ids(10, 11, 12, 13), trunk + ids(20, 21, 22, 23)
    a, b = (cache.open(b"", tokens, 9) for tokens in (one, two))
    for lease, tokens in ((a, one), (b, two)):
        assert cache.grow(lease, 10)
        cache.commit(lease, tokens, 10)
        cache.check([a, b])
    assert b.pages[:3] == a.pages[:3]
    assert not set(b.pages[3:]) & set(a.pages)
    assert (cache.stats.duplicate_pages, cache.stats.inserted_pages) == (3, 7)
    assert (held(cache, one), held(cache, two)) == (10, 10)


def test_extend_takes_over_what_another_committed() -> None:
    cache = CacheManager(num_pages=20, page_size=4)
    tokens = span(0, 18)
    leader, follower = (cache.open(b"", tokens, 17) for _ in range(2))
    assert cache.extend(follower, tokens, 17) == 0
    assert cache.grow(leader, 18)
    assert cache.grow(follower, 10)
    cache.commit(leader, tokens, 9)
    assert cache.extend(follower, tokens, 17) == 8
    assert (follower.pages[:2], len(follower.pages)) == (leader.pages[:2], 3), (
        "private pages there are replaced"
    )
    cache.check([leader, follower])
    cache.commit(leader, tokens, 18)
    assert cache.extend(follower, tokens, 15) == 12, "not beyond the limit"
    assert cache.extend(follower, tokens, 17) == 16
    assert follower.pages == leader.pages[:4]
    assert cache.extend(follower, tokens, 17) == 16
    assert cache.free == 15
    assert cache.stats.duplicate_pages == 0
    cache.check([leader, follower])


def test_a_long_answer_stays_one_run() -> None:
    cache = CacheManager(num_pages=100, page_size=2)
    tokens = span(0, 4)
    lease = cache.open(b"", tokens, 3)
    for token in range(200, 300):
        assert cache.grow(lease, len(tokens))
        cache.commit(lease, tokens, len(tokens))
        tokens.append(token)
    cache.check([lease])
    assert [node.size for node in cache.tiers.tree.nodes()] == [51]
    cache.release(lease)
    assert held(cache, tokens) == 102
    cache.check()


def test_runs_in_use_by_others_do_not_grow() -> None:
    cache = CacheManager(num_pages=20, page_size=2)
    tokens = span(0, 12)
    writer = cache.open(b"", tokens, 11)
    assert cache.grow(writer, 12)
    cache.commit(writer, tokens, 4)
    reader = cache.open(b"", tokens, 11)
    cache.commit(writer, tokens, 8)
    assert reader.num_shared == 2
    cache.check([writer, reader])
    cache.release(reader)
    cache.commit(writer, tokens, 12)
    cache.check([writer])
    cache.release(writer)
    assert counts(cache) == (14, 6, 0)


def test_eviction_order_is_exact() -> None:
    cache = CacheManager(num_pages=9, page_size=2)
    trunk = ids(1, 2)
    a, b, c = (trunk + span(start, 4) for start in (10, 20, 30))
    for tokens in (a, b, c):
        serve(cache, tokens)
    lease = cache.open(b"", a, 6)
    cache.release(lease)
    # Least recently used first: b, c, then a; of each the tail first; the trunk, in use as late as a, last.
    order: list[tuple[int, int, int]] = []
    filler = cache.open(b"other", span(500, 18), 17)
    for pages in range(1, 10):
        assert cache.grow(filler, 2 * pages)
        order.append((held(cache, b), held(cache, c), held(cache, a)))
        cache.check([filler])
    assert order == [
        *[(6, 6, 6), (6, 6, 6)],
        *[(4, 6, 6), (2, 6, 6)],
        *[(2, 4, 6), (2, 2, 6)],
        *[(2, 2, 4), (2, 2, 2), (0, 0, 0)],
    ]
    assert (cache.stats.evicted_pages, counts(cache)) == (7, (0, 0, 9))
    cache.release(filler)
    assert counts(cache) == (9, 0, 0)


def test_a_use_counts_when_it_ends() -> None:
    cache = CacheManager(num_pages=4, page_size=2)
    old, new = span(0, 4), span(10, 4)
    lease = cache.open(b"", old, 3)
    assert cache.grow(lease, 4)
    cache.commit(lease, old, 4)
    meanwhile = cache.open(b"", new, 3)
    assert cache.grow(meanwhile, 4)
    cache.commit(meanwhile, new, 4)
    cache.release(meanwhile)
    cache.release(lease)
    serve(cache, span(20, 4))
    assert (held(cache, old), held(cache, new)) == (4, 0)


def test_growing_evicts_only_the_deficit_or_nothing() -> None:
    cache = CacheManager(num_pages=6, page_size=4)
    old, busy = span(0, 16), span(100, 8)
    serve(cache, old)
    lease = cache.open(b"", busy, 7)
    assert cache.grow(lease, 8)
    assert not cache.grow(lease, 28), "more than the whole pool"
    assert (held(cache, old), cache.stats.evicted_pages) == (16, 0)
    assert cache.grow(lease, 9)
    assert (held(cache, old), cache.stats.evicted_pages) == (12, 1)
    other = cache.open(b"", old, 8)
    assert not cache.grow(other, 24), "locked pages cannot go"
    assert (len(other.pages), cache.available()) == (2, 1)
    assert cache.grow(other, 12)
    assert cache.available() == 0
    cache.check([lease, other])
