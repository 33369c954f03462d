"""The picture of the radix tree: which tier has what, what is in use, and what goes first."""

from __future__ import annotations

import time
from array import array
from typing import Any

import pytest

from helpers.cached_prompts import use
from helpers.live_server import Live, eventually
from helpers.tiered_engine import TieredEngine
from tierax.cache.manager import CacheManager
from tierax.cache.policies.registry import POLICIES, load_policy
from tierax.engine.plan import Collected
from tierax.engine.tree_picture import COLUMNS, picture

pytestmark = pytest.mark.asyncio

PROMPT = "abcdefghijklmnopqrstuvwxyz012345"
"""Eight pages of four tokens."""


async def settled(live: Live) -> None:
    await eventually(lambda: live.thread.engine.loop.idle)


async def test_the_tree_says_where_a_prefix_is(serve):
    live = await serve(engine=TieredEngine())

    async def tree(query: str = "") -> list[dict[str, Any]]:
        await settled(live)
        found = (await live.get(f"/dashboard/tree{query}"))[1]
        assert found["page_size"] == 4
        assert tuple(found["columns"]) == COLUMNS
        assert found["truncated"] is (query != "")
        return [dict(zip(COLUMNS, row, strict=True)) for row in found["nodes"]]

    assert await tree() == []
    await live.complete(PROMPT, max_tokens=1)
    [node] = await tree()
    where = {"pages": 8, "device": 8, "host": 8, "disk": 8}
    assert node == where | {"parent": -1, "heat": 0.5, "uses": 1, "in_use": False, "hidden": 0}
    await live.complete(PROMPT[:16] + "otherwise, it is", max_tokens=1)
    head, *tails = await tree()
    assert (head["parent"], head["pages"]) == (-1, 4)
    assert [(tail["parent"], tail["pages"]) for tail in tails] == [(0, 4), (0, 4)]
    assert sorted(tail["heat"] for tail in tails) != [0.5, 0.5]
    assert (await tree("?nodes=1")) == [head | {"hidden": 2, "heat": 0.5}]
    await live.post("/flush_cache?tier=device", None)
    assert [(node["device"], node["host"]) for node in await tree()] == [(0, 4)] * 3
    await live.post("/flush_cache?tier=host", None)
    assert await tree() == []


async def test_what_is_in_use_is_told(serve):
    engine = TieredEngine(pages=256)
    collect = engine.rig.device.collect

    def slowly() -> Collected:
        time.sleep(0.01)  # or the answer is over before a busy machine comes to ask for the tree
        return collect()

    engine.rig.device.collect = slowly
    live = await serve(engine=engine)
    stream = await live.open_stream("/v1/completions", prompt=PROMPT, max_tokens=900)
    nodes: list[Any] = []
    while not nodes:
        nodes = (await live.get("/dashboard/tree"))[1]["nodes"]
    assert nodes[0][COLUMNS.index("in_use")] is True
    assert nodes[0][COLUMNS.index("heat")] == 1.0
    stream.close()
    await settled(live)
    nodes = (await live.get("/dashboard/tree"))[1]["nodes"]
    assert not any(node[COLUMNS.index("in_use")] for node in nodes)


def branches(cache: CacheManager, *, strict: bool) -> tuple[list[int], int | None]:
    """Pages below each child of the roots, and which of them has the coldest node."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in picture(cache.tiers, None, 1000)["nodes"]]
    branch: list[int] = []
    pages: list[int] = []
    coldest = None
    for row in rows:
        if row["parent"] < 0:
            branch.append(len(pages))
            pages.append(0)
        else:
            branch.append(branch[row["parent"]])
            # A prefix never goes before what continues it.
            assert row["heat"] < rows[row["parent"]]["heat"] or not strict
        pages[branch[-1]] += row["device"]
        if row["heat"] == 0.0:
            assert coldest is None
            coldest = branch[-1]
    return pages, coldest


@pytest.mark.parametrize("policy", [*sorted({*POLICIES} - {"ttl"}), "ttl=1h"])
async def test_heat_is_the_order_of_eviction(policy):
    """What goes first is coldest, whatever the policy."""
    cache = CacheManager(200, 1, load_policy(policy))
    for length in [5, 6, 9, 12, 15, 18, 21, 24, 5, 9, 9, 18, 5, 24, 9]:
        use(cache, [100 * length + i for i in range(length)])
    before, coldest = branches(cache, strict=policy == "lru")
    assert len(before) == 8
    lease = cache.open(b"", array("i", [1]), 0)
    assert cache.grow(lease, cache.free + 1)
    after, _ = branches(cache, strict=False)
    cache.release(lease)
    shrunk = [place for place in range(8) if after[place] < before[place]]
    assert len(shrunk) == 1
    # These two may spare what is next.
    assert shrunk == [coldest] or policy in ("slru", "s3fifo")


async def test_a_picture_is_cheap_and_bounded():
    """Of a great tree only so much is read: the engine waits for it."""
    cache = CacheManager(50_000, 1)
    for first in range(3000):
        use(cache, [first, *range(10), first])
    began = time.perf_counter()
    found = picture(cache.tiers, None, 2000)
    assert time.perf_counter() - began < 1.0
    assert len(found["nodes"]) == 2000
    assert found["truncated"] is True
    assert found["hidden_roots"] == 1000
