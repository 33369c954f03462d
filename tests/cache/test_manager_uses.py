"""What the host's policy hears of a use, and what leaves the host first."""

from __future__ import annotations

from helpers.manager_calls import serve, span
from tierax.cache.manager import CacheManager
from tierax.cache.policies.lru import LRU
from tierax.cache.policies.policy import Evictable
from tierax.cache.policies.registry import Use


class Hearing(LRU):
    """Remembers what it has heard of."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []
        """Tick of a use, and the depth of what was used."""

    def touch(self, item: Evictable, use: Use) -> None:
        self.heard.append((use.tick, item.end))
        super().touch(item, use)


def test_the_host_hears_of_a_request_once_and_at_its_end() -> None:
    policy, tokens = Hearing(), span(0, 41)
    cache = CacheManager(32, 4, host_pages=32, host_policy=policy)
    for _ in range(2):
        lease = cache.open(b"", tokens, 40)
        assert cache.grow(lease, 41)
        for known in (16, 40):
            # Chunk by chunk it goes down to the host, and to the disk.
            cache.commit(lease, tokens, known)
            assert lease.node is not None
            cache.tiers.save(lease.node)
            hold = cache.hold_down_to(lease.node)
            cache.drop(hold, leased=True)
            cache.check([lease])
        before = len(policy.heard)
        cache.release(lease)
        cache.check()
        assert {depth for _, depth in policy.heard} == {10}
        assert len(policy.heard) == before + 1
    assert len(policy.heard) == 2


def test_what_no_use_will_touch_is_touched_when_it_is_let_go() -> None:
    policy, tokens = Hearing(), span(0, 41)
    cache = CacheManager(32, 4, host_pages=32, host_policy=policy, write_policy="write_back")
    serve(cache, tokens)
    hold = cache.hold(b"", tokens, 40, save=True)
    assert (hold.num_pages, policy.heard) == (10, [])
    cache.check()
    cache.drop(hold)
    cache.check()
    assert len(policy.heard) == 1


def test_what_is_in_the_course_of_a_use_leaves_the_host_last() -> None:
    cache = CacheManager(64, 4, host_pages=8)
    old, new = span(0, 17), span(100, 17)
    serve(cache, old)
    hold = cache.hold(b"", old, 16, save=True)
    cache.drop(hold)
    lease = cache.open(b"", new, 16)
    assert cache.grow(lease, 17)
    cache.commit(lease, new, 16)
    assert lease.node is not None
    cache.tiers.save(lease.node)
    assert cache.host.free == 0
    rows = cache.take_rows(6)
    cache.check([lease])
    match = [cache.match(b"", tokens, 16).host for tokens in (old, new)]
    assert (len(rows), match) == (6, [0, 2])
    cache.give_rows(rows)
    cache.release(lease)
    cache.check()
