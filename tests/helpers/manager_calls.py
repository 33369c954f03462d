"""Short calls of a cache manager, for tests that count."""

from __future__ import annotations

from array import array

from tierax.cache.manager import CacheManager


def ids(*values: int) -> array[int]:
    return array("i", values)


def span(start: int, count: int) -> array[int]:
    return array("i", range(start, start + count))


def serve(cache: CacheManager, tokens: array[int], namespace: bytes = b"") -> int:
    """One request from start to end; returns how many of its tokens were cached."""
    lease = cache.open(namespace, tokens, len(tokens) - 1)
    cached = lease.num_shared * cache.page_size
    assert cache.grow(lease, len(tokens))
    cache.commit(lease, tokens, len(tokens))
    cache.check([lease])
    cache.release(lease)
    cache.check()
    return cached


def counts(cache: CacheManager) -> tuple[int, int, int]:
    return cache.free, cache.evictable, cache.in_use


def held(cache: CacheManager, tokens: array[int]) -> int:
    return cache.match_length(b"", tokens)
