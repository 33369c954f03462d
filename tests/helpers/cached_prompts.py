"""A cache that has served prompts, without an engine."""

from __future__ import annotations

from array import array

from tierax.cache.manager import CacheManager


def use(cache: CacheManager, tokens: list[int]) -> None:
    """One request from start to end."""
    ids = array("i", tokens)
    lease = cache.open(b"", ids, len(ids) - 1)
    assert cache.grow(lease, len(ids))
    cache.commit(lease, ids, len(ids))
    cache.release(lease)
