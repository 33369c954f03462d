"""Block-level replays: small traces by hand, known answers of a public trace, and the optimum against brute force."""

from __future__ import annotations

import random
from array import array
from functools import cache
from pathlib import Path

import pytest

from tierax.cache.policies.registry import POLICIES, load_policy
from tierax.lab.oracle import belady, infinite
from tierax.lab.replay import replay
from tierax.lab.traces.read import load_trace
from tierax.lab.traces.trace import Trace, TraceRequest

HERE = Path(__file__).parent / "traces"
WHOLE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.zst"
"""Beside the checkout, where somebody has put it."""


@cache
def whole_trace() -> Trace:
    if not WHOLE.is_file():
        pytest.skip(f"the whole trace is not here: {WHOLE.name} in ../shared/traces")
    return load_trace(WHOLE)


def trace_of(*paths: str, size: int = 1, tenants: str = "") -> Trace:
    """A letter is a block of one token."""
    requests = [
        TraceRequest(float(i), array("i", map(ord, path)), len(path) * size, 1, tenant=tenants[i : i + 1])
        for i, path in enumerate(paths)
    ]
    return Trace("letters", requests, size)


def rate(trace: Trace, capacity: int, policy: str = "lru") -> float:
    return replay(trace, capacity, load_policy(policy)).token_hit_rate


def test_a_hit_is_the_longest_cached_prefix_weighted_by_tokens() -> None:
    hits = replay(trace_of("abc", "abd", "bc"), 10, load_policy("lru"))
    assert (hits.requests, hits.prompt_tokens, hits.hit_tokens) == (3, 8, 2)
    short_end = Trace("x", [TraceRequest(i, array("i", [1, 2]), 20, 1) for i in range(2)], 16)
    assert replay(short_end, 10, load_policy("lru")).hit_tokens == 20


def test_lru_evicts_leaves_only_and_of_one_request_the_deepest_first() -> None:
    # "ab" and "c" fill it; "d" takes b, the deeper half of the older request.
    hits = replay(trace_of("ab", "c", "d", "ab", "c"), 3, load_policy("lru"))
    assert hits.hit_tokens == 1
    assert hits.evicted_blocks == 3


def test_of_a_path_longer_than_the_cache_the_head_is_kept() -> None:
    assert replay(trace_of("abcd", "abcd"), 2, load_policy("lru")).hit_tokens == 2
    assert belady(trace_of("abcd", "abcd"), [2])[2].hit_tokens == 2


def test_tenants_share_nothing() -> None:
    trace = trace_of("ab", "ab", "ab", tenants="xyx")
    assert replay(trace, 10, load_policy("lru")).hit_tokens == 2
    assert infinite(trace).hit_tokens == 2
    assert belady(trace, [10])[10].hit_tokens == 2


def test_belady_keeps_what_comes_back_soonest_and_lets_the_rest_pass_by() -> None:
    # LRU drops a for the passing b and c.
    trace = trace_of("a", "b", "c", "a", "d", "a")
    assert replay(trace, 1, load_policy("lru")).hit_tokens == 0
    assert belady(trace, [1])[1].hit_tokens == 2


def test_belady_is_as_good_as_trying_everything() -> None:
    rng = random.Random(3)
    for _ in range(30):
        paths = ["".join(rng.choices("ab", k=rng.randint(1, 3))) for _ in range(7)]
        trace = trace_of(*paths)
        capacity = rng.randint(1, 4)
        assert belady(trace, [capacity])[capacity].hit_tokens == _best(tuple(paths), capacity), paths


def _best(paths: tuple[str, ...], capacity: int) -> int:
    """The most hits of any choices: after each request, any closed part of what is there may stay."""
    states = {frozenset(): 0}
    for path in paths:
        heads = [path[: i + 1] for i in range(len(path))]
        following: dict[frozenset[str], int] = {}
        for state, hits in states.items():
            gained = hits + sum(head in state for head in heads)
            for kept in _closed_parts(state | set(heads), capacity):
                following[kept] = max(following.get(kept, 0), gained)
        states = following
    return max(states.values())


def _closed_parts(blocks: frozenset[str], capacity: int) -> list[frozenset[str]]:
    parts = [frozenset()]
    for block in sorted(blocks, key=len):
        head = block[:-1]
        parts += [part | {block} for part in parts if (not head or head in part) and len(part) < capacity]
    return parts


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"ttl"}))
def test_no_policy_beats_the_optimum_and_a_larger_cache_holds_more_of_a_real_trace(policy: str) -> None:
    trace = load_trace(HERE / "mooncake_conversation_1000.jsonl.zst").head(400)
    capacities = (200, 1000, 6000)
    best = belady(trace, capacities)
    everything = infinite(trace).token_hit_rate
    rates = [rate(trace, capacity, policy) for capacity in capacities]
    assert all(
        found <= best[capacity].token_hit_rate for found, capacity in zip(rates, capacities, strict=True)
    )
    assert rates[0] < rates[-1] <= everything
    assert best[6000].token_hit_rate == everything


def test_known_answers_of_the_slice() -> None:
    trace = load_trace(HERE / "mooncake_conversation_1000.jsonl.zst")
    assert replay(trace, 2000, load_policy("lru")).hit_tokens == SLICE["lru"]
    assert replay(trace, 2000, load_policy("fifo")).hit_tokens == SLICE["fifo"]
    assert belady(trace, [2000])[2000].hit_tokens == SLICE["belady"]
    assert infinite(trace).hit_tokens == SLICE["infinite"]


SLICE = {"lru": 588660, "fifo": 588660, "belady": 2796376, "infinite": 2962776}
"""Tokens hit with 2,000 blocks."""
KNOWN = {2_000: (5.5, 26.0), 10_000: (21.6, 37.4), 20_000: (29.4, 37.4), 50_000: (36.15, 37.4)}
"""Capacity in blocks -> percent of tokens that LRU and Belady hit on the whole conversation trace, to 0.1 point."""


@pytest.mark.parametrize("capacity", KNOWN)
def test_known_answers_of_lru_on_the_whole_conversation_trace(capacity: int) -> None:
    assert rate(whole_trace(), capacity) * 100 == pytest.approx(KNOWN[capacity][0], abs=0.06)


def test_known_answers_of_the_oracles_on_the_whole_conversation_trace() -> None:
    trace = whole_trace()
    assert infinite(trace).token_hit_rate * 100 == pytest.approx(37.4, abs=0.06)
    found = belady(trace, list(KNOWN))
    for capacity, (_, expected) in KNOWN.items():
        assert found[capacity].token_hit_rate * 100 == pytest.approx(expected, abs=0.06)
