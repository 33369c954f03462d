"""Random mixes of requests, aborts, faults and tiny pools on the fake device: every answer is the solo answer."""

from __future__ import annotations

import logging
import random

import pytest

from helpers.fake_executor import solo
from helpers.fake_rig import FakeTransfers, Rig
from tierax.engine.request import Request
from tierax.engine.schedule_policy import LPM

ROUNDS, MIXES_PER_ROUND = 8, 50


@pytest.mark.parametrize("round", range(ROUNDS))
def test_every_answer_is_the_solo_answer(round: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    retractions = hits = evictions = 0
    for seed in range(round * MIXES_PER_ROUND, (round + 1) * MIXES_PER_ROUND):
        stats = _run_mix(random.Random(seed), seed).loop.stats
        retractions += stats.retractions
        hits += stats.cached_tokens
        evictions += stats.evicted_pages
    assert min(retractions, hits, evictions) > 5, "the mixes are too tame"


def test_without_sharing_the_answers_are_the_same() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        alone = Rig(pages=1000, enabled=False)
        requests = [alone.add(_prompt(rng, [], 40), 10, seed=n) for n in range(5)]
        alone.run()
        assert alone.loop.stats.cached_tokens == 0
        for request in requests:
            alone.expect_solo(request)


def _run_mix(rng: random.Random, seed: int) -> Rig:
    longest = rng.choice([20, 40, 70])
    rig, transfers = _make_rig(rng, longest)
    prefixes = [_prompt(rng, [], longest - 10) for _ in range(3)]
    spread = rng.choice([1, 30])
    arrivals = sorted(rng.randrange(spread) for _ in range(rng.randint(2, 9)))
    requests: list[Request] = []
    for step in range(6000):
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            request = _make_request(rng, rig, prefixes, longest)
            if transfers is not None:
                transfers.ready_at[request.id] = rig.clock() + rng.random() * 0.2
            rig.loop.add(request)
            requests.append(request)
        if rig.loop.idle and not arrivals:
            break
        if rig.loop.request_ids and rng.random() < 0.02:
            rig.loop.abort(rng.choice(rig.loop.request_ids))
        if rng.random() < 0.004:
            setattr(rig.device, rng.choice(["submit_error", "collect_error"]), RuntimeError("lost"))
        if not rig.step():
            rig.clock.advance(0.001)
    else:
        raise AssertionError(f"mix {seed}: not idle after 6,000 steps")
    _check_end(rig, transfers, requests, seed)
    return rig


def _make_rig(rng: random.Random, longest: int) -> tuple[Rig, FakeTransfers | None]:
    page_size = rng.choice([1, 4, 16])
    transfers = FakeTransfers() if rng.random() < 0.3 else None
    rig = Rig(
        # From just enough for the longest request to plenty.
        pages=max(2, int(-(-longest // page_size) * rng.choice([1, 1.1, 1.3, 1.6, 2, 5]))),
        page_size=page_size,
        seqs=rng.randint(1, 6),
        budget=rng.choice([1, 2, 7, 24, 317]),
        policy=LPM(max_age=0.05) if rng.random() < 0.5 else None,
        transfers=transfers,
        enabled=rng.random() < 0.85,
    )
    return rig, transfers


def _prompt(rng: random.Random, prefix: list[int], longest: int) -> list[int]:
    return [*prefix, *(rng.randrange(5) for _ in range(rng.randint(1, longest)))]


def _make_request(rng: random.Random, rig: Rig, prefixes: list[list[int]], longest: int) -> Request:
    prompt = _prompt(rng, rng.choice(prefixes)[: rng.randint(0, longest)], 6)[: longest - 1]
    return rig.request(
        prompt,
        min(rng.choice([3, 25, 60]), longest - len(prompt)),
        seed=rng.randrange(3),
        stop_ids=rng.sample(range(100), rng.choice([0, 0, 3])),
        namespace=rng.choice([b"", b"", b"x"]),
        min_tokens=rng.choice([0, 0, 3]),
    )


def _check_end(rig: Rig, transfers: FakeTransfers | None, requests: list[Request], seed: int) -> None:
    rig.cache.check()
    assert rig.cache.in_use == 0
    for request in requests:
        if request.finish_reason in ("abort", "error"):
            assert rig.output(request) == solo(request)[: request.num_output], f"mix {seed}: {request.id}"
        else:
            rig.expect_solo(request)
        assert request.cached_tokens < request.num_prompt
    assert rig.loop.stats.cached_tokens == sum(request.cached_tokens for request in requests)
    if transfers is not None:
        assert sorted(transfers.started) == sorted(transfers.ended) == sorted(r.id for r in requests)
