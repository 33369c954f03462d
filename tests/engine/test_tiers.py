"""Three tiers under the real loop, on a fake device with a manual clock: hits, order, faults, bounds."""

from __future__ import annotations

import random

import pytest

from helpers.fake_rig import Rig
from helpers.tiered_rig import TieredRig
from tierax.cache.moves import Outcome
from tierax.cache.radix_tree import DEVICE, HOST


def prompt(name: int, length: int) -> list[int]:
    return [name * 1000 + i for i in range(length)]


def serve(rig: Rig, tokens: list[int], **options: object):
    request = rig.add(tokens, max_tokens=2, **options)
    rig.run()
    rig.expect_solo(request)
    return request


def test_what_left_the_device_comes_back_from_the_host() -> None:
    rig = TieredRig(pages=16, host_pages=64, disk=False)
    first = serve(rig, prompt(1, 40))
    assert first.cached_tokens == 0
    assert rig.cache.match(b"", first.tokens, 40) == (10, 10), "write_through: in both tiers"
    for name in range(2, 6):
        serve(rig, prompt(name, 40))
    assert rig.cache.match(b"", first.tokens, 40) == (0, 10)
    again = serve(rig, prompt(1, 40))
    assert again.cached_by_tier == {"device": 0, "host": 36, "disk": 0}
    assert rig.device.computed(again)[0] == 36, "only the last page is computed again"
    assert again.cached_tokens == 36
    once_more = serve(rig, prompt(1, 40))
    assert once_more.cached_by_tier == {"device": 36, "host": 0, "disk": 0}


def test_a_restart_hits_what_the_disk_has() -> None:
    rig = TieredRig(pages=32)
    serve(rig, prompt(1, 40))
    after = TieredRig(pages=32, store=rig.store)
    request = serve(after, prompt(1, 40))
    assert request.cached_by_tier == {"device": 0, "host": 0, "disk": 36}
    assert after.device.computed(request)[0] == 36


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_write_policies(policy: str) -> None:
    rig = TieredRig(pages=16, host_pages=64, write_policy=policy)
    serve(rig, prompt(1, 40))
    on_host = rig.cache.match(b"", rig.add(prompt(1, 40)).tokens, 40).host
    rig.run()
    assert on_host == (10 if policy == "write_through" else 0)
    serve(rig, prompt(1, 40))
    assert rig.cache.match(b"", rig.add(prompt(1, 40)).tokens, 40).host == (
        0 if policy == "write_back" else 10
    )
    rig.run()
    for name in range(2, 6):
        serve(rig, prompt(name, 40))
    again = serve(rig, prompt(1, 40))
    assert again.cached_by_tier["host"] == 36
    once = rig.cache.match(b"", rig.add(prompt(2, 40)).tokens, 40)
    assert once.host == (0 if policy == "write_through_selective" else 10), "used once only"
    rig.run()


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.CORRUPT, Outcome.MISSING])
def test_a_page_that_cannot_be_read_cuts_the_hit(outcome: Outcome) -> None:
    rig = TieredRig(pages=32)
    serve(rig, prompt(1, 40))
    after = TieredRig(pages=32, store=rig.store)
    bad = next(key for key in rig.store.pages if key.depth == 2)
    after.mover.fault = lambda kind, key: outcome if (kind, key) == ("read", bad) else Outcome.OK
    request = serve(after, prompt(1, 40))
    assert request.cached_tokens == 8, "two pages before the bad one"
    assert after.prefetcher.stats.failed_pages == {outcome.value: 1}
    after.mover.fault = lambda kind, key: Outcome.OK
    third = TieredRig(pages=32, store=rig.store)
    assert serve(third, prompt(1, 40)).cached_tokens == 36, "it was written again, or was there all the time"


def test_policies_bound_the_wait_for_a_stalled_disk() -> None:
    rig = TieredRig(pages=32)
    serve(rig, prompt(1, 40))
    for name, (policy, limit) in enumerate(
        [("best_effort", 0.0), ("timeout=300ms", 0.3), ("wait_complete", 10.0)], start=2
    ):
        after = TieredRig(pages=32, store=rig.store, prefetch=policy)
        after.mover.delay = lambda kind: 30.0 if kind == "read" else 0.0
        request = after.add(prompt(1, 40), max_tokens=2)
        other = after.add(prompt(name, 8), max_tokens=2)
        while request.finish_reason is None:
            if not after.step():
                after.clock.advance(0.01)
        assert other.finished_at is not None
        assert other.finished_at < 0.2, "nobody else waits"
        assert request.first_scheduled is not None
        assert limit <= request.first_scheduled <= limit + 0.1
        after.expect_solo(request)
        assert request.cached_tokens == 0
        assert after.prefetcher.stats.timed_out == 1
        after.run(most_steps=100_000)
        late = serve(after, prompt(1, 40))
        assert late.cached_tokens == 36


def test_what_has_arrived_in_time_is_used() -> None:
    rig = TieredRig(pages=32)
    serve(rig, prompt(1, 40))
    after = TieredRig(pages=32, store=rig.store, prefetch="timeout=300ms")
    delays = iter([0.1, 0.1, 0.1, *[5.0] * 20])
    after.mover.delay = lambda kind: next(delays) if kind == "read" else 0.0
    request = after.add(prompt(1, 40), max_tokens=2)
    while request.finish_reason is None:
        if not after.step():
            after.clock.advance(0.01)
    assert request.cached_tokens == 12
    after.run(most_steps=100_000)


def test_two_requests_share_one_read_and_one_load() -> None:
    rig = TieredRig(pages=64)
    serve(rig, prompt(1, 40))
    after = TieredRig(pages=64, store=rig.store)
    after.mover.delay = lambda kind: 0.05
    one, two = after.add(prompt(1, 40), max_tokens=2), after.add(prompt(1, 36) + prompt(7, 9), max_tokens=2)
    after.run()
    after.expect_solo(one)
    after.expect_solo(two)
    assert sum(move.pages for move in after.mover.moves if move.kind == "read") == 9
    assert sum(move.pages for move in after.mover.moves if move.kind == "load") == 9
    assert one.cached_tokens == two.cached_tokens == 36


def test_who_has_been_loaded_does_not_wait_for_one_that_waits_for_its_room() -> None:
    rig = TieredRig(pages=64)
    serve(rig, prompt(1, 40))
    after = TieredRig(pages=12, store=rig.store)
    serve(after, prompt(2, 24))
    after.cache.clear(DEVICE)
    delays = {"read": 0.1, "load": 0.3}
    after.mover.delay = lambda kind: delays.get(kind, 0.0)
    first, second = after.add(prompt(1, 40), max_tokens=2), after.add(prompt(2, 24), max_tokens=2)
    # The first has its pages when the second, which came up from the host meanwhile, has taken half of the device.
    after.run()
    for request in (first, second):
        after.expect_solo(request)
    assert second.first_scheduled is not None
    assert first.first_scheduled is not None
    assert second.first_scheduled < first.first_scheduled
    assert (first.cached_tokens, second.cached_tokens) == (36, 20)


def test_abort_while_it_is_read_or_loaded() -> None:
    rig = TieredRig(pages=64)
    serve(rig, prompt(1, 40))
    for steps in range(12):
        after = TieredRig(pages=64, store=rig.store)
        after.mover.delay = lambda kind: 0.004
        request = after.add(prompt(1, 40), max_tokens=2)
        for _ in range(steps):
            if not after.step():
                after.clock.advance(0.001)
        after.loop.abort(request.id)
        after.run()
        assert serve(after, prompt(1, 40)).cached_tokens >= 36


def test_a_full_host_defers_reads() -> None:
    rig = TieredRig(pages=64, host_pages=64)
    for name in (1, 2, 3):
        serve(rig, prompt(name, 40))
    after = TieredRig(pages=64, host_pages=12, store=rig.store)
    after.mover.delay = lambda kind: 0.01
    requests = [after.add(prompt(name, 40), max_tokens=2) for name in (1, 2, 3)]
    after.run()
    for request in requests:
        after.expect_solo(request)
    assert [request.cached_tokens for request in requests] == [36, 36, 36]


def test_a_prompt_longer_than_the_host_keeps_no_other_from_the_disk() -> None:
    rig = TieredRig(pages=64, host_pages=8)
    serve(rig, prompt(1, 40))
    assert len(rig.store.pages) == 8, "as much of it as goes in"
    serve(rig, prompt(2, 20))
    assert len(rig.store.pages) == 13
    after = TieredRig(pages=64, host_pages=8, store=rig.store)
    assert serve(after, prompt(2, 20)).cached_tokens == 16
    assert serve(after, prompt(1, 40)).cached_tokens == 32


def test_slow_disk_is_not_asked_when_computing_is_faster() -> None:
    rig = TieredRig(pages=64)
    for name in (1, 2, 3):
        serve(rig, prompt(name, 40))
    after = TieredRig(pages=64, store=rig.store)
    after.prefetcher.choice.read.measure(1000, 1.0, 0.0)
    after.prefetcher.choice.prefill.measure(1000, 1.0, 0.0)
    assert serve(after, prompt(1, 40)).cached_tokens == 0
    assert after.prefetcher.stats.declined_pages == 9
    after.clock.advance(11)
    assert serve(after, prompt(2, 40)).cached_tokens == 4, "a page is tried after a while"
    assert serve(after, prompt(3, 40)).cached_tokens == 36, "and has been fast"


def test_what_a_slow_disk_brings_before_ones_turn_is_read() -> None:
    rig = TieredRig(pages=64)
    serve(rig, prompt(1, 40))
    after = TieredRig(pages=64, store=rig.store)
    after.prefetcher.choice.read.measure(1000, 0.1, 0.0)
    after.prefetcher.choice.prefill.measure(100, 1.0, 0.0)
    before, request = after.add(prompt(9, 40), max_tokens=2), after.add(prompt(1, 40), max_tokens=2)
    after.run()
    for served in (before, request):
        after.expect_solo(served)
    assert request.cached_tokens == 16, "0.4 s until the one before is computed, a page in 0.1 s"
    assert after.prefetcher.stats.declined_pages == 5


def test_a_page_that_stalls_does_not_make_the_disk_slow() -> None:
    rig = TieredRig(pages=64)
    for name in (1, 2):
        serve(rig, prompt(name, 40))
    after = TieredRig(pages=64, store=rig.store, prefetch="timeout=100ms")
    after.prefetcher.choice.prefill.measure(1000, 1.0, 0.0)
    delays = iter([0.001] * 7 + [2.0] + [0.001] * 10)
    after.mover.delay = lambda kind: next(delays) if kind == "read" else 0.0
    assert serve(after, prompt(1, 40)).cached_tokens == 28, "up to the page that stalled"
    assert serve(after, prompt(2, 40)).cached_tokens == 36
    assert after.prefetcher.stats.declined_pages == 0


def test_a_broken_disk_costs_hits_only_and_recovers() -> None:
    rig = TieredRig(pages=64)
    rig.mover.fault = lambda kind, key: Outcome.NO_SPACE if kind == "write" else Outcome.OK
    serve(rig, prompt(1, 40))
    assert not rig.store.pages
    assert 1 <= rig.writer.stats.failed_pages["no_space"] <= 10
    rig.mover.fault = lambda kind, key: Outcome.OK
    rig.clock.advance(6)
    serve(rig, prompt(1, 40))
    assert len(rig.store.pages) >= 10, "written once there is room again"


def test_the_device_is_lost_but_the_host_is_not() -> None:
    rig = TieredRig(pages=64)
    serve(rig, prompt(1, 40))
    victim = rig.add(prompt(2, 40))
    rig.step()
    rig.device.collect_error = RuntimeError("lost")
    rig.run()
    assert victim.finish_reason == "error"
    request = serve(rig, prompt(1, 40))
    assert request.cached_by_tier == {"device": 0, "host": 36, "disk": 0}


def test_tenants_share_nothing_in_any_tier() -> None:
    rig = TieredRig(pages=64)
    tokens = prompt(1, 40)
    assert [serve(rig, tokens, namespace=name).cached_tokens for name in (b"s1", b"s1", b"s2", b"")] == [
        0,
        36,
        0,
        0,
    ]
    after = TieredRig(pages=64, store=rig.store)
    assert [serve(after, tokens, namespace=name).cached_tokens for name in (b"s1", b"s3", b"s2")] == [
        36,
        0,
        36,
    ]


def test_clear_one_tier() -> None:
    rig = TieredRig(pages=64)
    serve(rig, prompt(1, 40))
    rig.cache.clear(DEVICE)
    assert serve(rig, prompt(1, 40)).cached_by_tier["host"] == 36
    rig.cache.clear(DEVICE)
    rig.cache.clear(HOST)
    rig.cache.check()
    assert serve(rig, prompt(1, 40)).cached_by_tier["disk"] == 36


@pytest.mark.parametrize("seed", range(60))
def test_random_mixes_over_three_tiers(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4])
    options = {
        "pages": rng.randrange(24, 60) // page + 8,
        "host_pages": rng.choice([0, 4, 10, 40]),
        "page_size": page,
        "seqs": rng.choice([1, 3, 5]),
        "budget": rng.choice([5, 16, 40]),
        "write_policy": rng.choice(["write_through", "write_through_selective", "write_back"]),
        "prefetch": rng.choice(["best_effort", "wait_complete", "timeout=20ms"]),
        "disk": rng.random() < 0.8,
        "disk_pages": rng.choice([None, 12, 40]),
    }
    store = None
    hits = 0
    for _ in range(3):
        rig = TieredRig(store=store, **options)
        store = rig.store
        rig.mover.delay = lambda kind: rng.choice([0.0, 0.001, 0.02, 0.2])
        rig.mover.fault = lambda kind, key: rng.choice(
            [*[Outcome.OK] * 12, Outcome.IO_ERROR, Outcome.CORRUPT]
        )
        requests = []
        while len(requests) < 25 or not rig.loop.idle:
            if len(requests) < 25 and rng.random() < 0.4:
                stem = prompt(rng.randrange(3), rng.randrange(1, 24))
                tail = [rng.randrange(50) for _ in range(rng.randrange(0, 6))]
                most = rig.cache.capacity_tokens - 2
                tokens = (stem + tail)[:most]
                requests.append(
                    rig.add(
                        tokens, rng.randrange(1, 8), seed=rng.randrange(3), namespace=rng.choice([b"", b"t"])
                    )
                )
            if rng.random() < 0.03 and requests:
                rig.loop.abort(rng.choice(requests).id)
            if rng.random() < 0.01:
                rig.cache.clear(rng.choice([None, DEVICE, HOST]))
            if rng.random() < 0.005:
                rig.device.collect_error = RuntimeError("lost")
            if not rig.step():
                rig.clock.advance(0.003)
        rig.cache.check()
        assert rig.cache.in_use == rig.cache.host.in_use == 0
        for request in requests:
            if request.finish_reason in ("stop", "length"):
                rig.expect_solo(request)
            hits += request.cached_tokens
    assert hits > 0


def test_the_disk_hears_of_a_use_once_however_many_pages_an_answer_grows_by() -> None:
    rig = TieredRig(pages=32)
    assert rig.index is not None
    heard: list[int] = []
    touch = rig.index.touch

    def counted(keys, use) -> None:
        heard.append(len(keys))
        touch(keys, use)

    rig.index.touch = counted
    request = rig.add(prompt(1, 20), max_tokens=25)
    rig.run()
    rig.expect_solo(request)
    assert len(rig.store.pages) == 11, "all of prompt and answer but the last token's page"
    assert heard == [11]
    again = rig.add(prompt(1, 20), max_tokens=1)
    rig.run()
    assert heard[1:] == [5], "what was only used again is not written, but has been used"
    assert again.cached_tokens == 16
