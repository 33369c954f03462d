"""A trace through the production tree and an eviction policy, block by block: one tier, no time, requests in file order.

    hit       the longest prefix of whole blocks that is cached when the request comes, weighted by tokens
    miss      enters at once, while the request's path is locked; of a path that is too long, the head
    output    enters nothing: traces carry no ids for it

A page of the tree is one block, its id the page's only token. The whole trace counts, its cold start too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from ..cache.manager import CacheManager
from ..cache.policies.registry import EvictionPolicy
from .traces.trace import Trace, TraceRequest


@dataclass(slots=True)
class Hits:
    """What a replay found, in tokens of prompts and in blocks."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def count(self, sizes: list[int], hit_blocks: int) -> None:
        """One request whose first `hit_blocks` blocks, of these sizes, were cached."""
        self.requests += 1
        self.prompt_tokens += sum(sizes)
        self.hit_tokens += sum(sizes[:hit_blocks])


def replay(
    trace: Trace,
    capacity_blocks: int,
    policy: EvictionPolicy,
    *,
    seen: Callable[[TraceRequest, int], None] = lambda request, hit_tokens: None,
) -> Hits:
    """Hits of a cache of `capacity_blocks` blocks under a policy, which is given to nobody else.

    The policy's seconds are the arrivals. `seen` hears of each request, and of the tokens that it hit.
    Raises ValueError for a capacity below 1.
    """
    now = 0.0
    cache = CacheManager(capacity_blocks, 1, policy, clock=lambda: now)
    hits = Hits()
    for request in trace.requests:
        # A policy is not told of times that run backwards.
        now = max(now, request.arrival)
        cache.tiers.expire(now)
        sizes = trace.prompt_sizes(request)
        before = hits.hit_tokens
        hits.count(sizes, _serve(cache, request.tenant.encode(), request.blocks[: len(sizes)]))
        seen(request, hits.hit_tokens - before)
    hits.evicted_blocks = cache.stats.evicted_pages
    return hits


def _serve(cache: CacheManager, namespace: bytes, blocks: array[int]) -> int:
    """Looks the blocks up, puts in what is missing, and returns how many were there."""
    lease = cache.open(namespace, blocks, len(blocks))
    hit = lease.num_shared
    fits = min(len(blocks), hit + cache.available())
    cache.grow(lease, fits)
    cache.commit(lease, blocks, fits)
    cache.release(lease)
    return hit
