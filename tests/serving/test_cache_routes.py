"""What operators and tenants may ask of the cache over HTTP, on the real loop and three tiers (DEFECTS k, h5, a3)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from helpers.live_server import Live, eventually
from helpers.tiered_engine import TieredEngine
from tierax.cache.moves import Move, Outcome

pytestmark = pytest.mark.asyncio

PROMPT = "abcdefghijklmnopqrstuvwxyz012345"
"""Eight pages of four tokens."""


async def settled(live: Live) -> None:
    """Until nothing moves between the tiers any more."""
    await eventually(lambda: live.thread.engine.loop.idle)


async def cached(live: Live, prompt: str = PROMPT, **fields: Any) -> dict[str, int]:
    """Completes a prompt; where it was found."""
    headers = fields.pop("headers", None)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0} | fields
    status, answer = await live.post("/v1/completions", body, headers=headers)
    assert status == 200, answer
    details = answer["usage"]["prompt_tokens_details"]
    assert sum(details["cached_tokens_by_tier"].values()) == details["cached_tokens"]
    return details["cached_tokens_by_tier"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_usage_tells_where_the_prompt_was(serve):
    engine = TieredEngine()
    live = await serve(engine=engine)
    assert await cached(live) == {"device": 0, "host": 0, "disk": 0}
    await settled(live)
    assert await cached(live) == {"device": 28, "host": 0, "disk": 0}
    await live.post("/flush_cache?tier=device", None)
    assert await cached(live) == {"device": 0, "host": 28, "disk": 0}
    await settled(live)
    for tier in ("device", "host"):
        assert (await live.post(f"/flush_cache?tier={tier}", None))[0] == 200
    last = (
        await live.stream(
            "/v1/completions", prompt=PROMPT, max_tokens=1, stream_options={"include_usage": True}
        )
    )[-1]
    details = last["usage"]["prompt_tokens_details"]
    assert details == {
        "cached_tokens": 28,
        "cached_tokens_by_tier": {"device": 0, "host": 0, "disk": 28},
    }
    stat = (await live.get("/cache/stat"))[1]
    assert stat["tokens"]["hits_by_tier"] == {"device": 28, "host": 28, "disk": 28}
    assert stat["tokens"]["hits"] == 84
    assert stat["tokens"]["queries"] == 4 * len(PROMPT)


async def test_prefetch_policy_of_a_request(serve):
    engine = TieredEngine()
    live = await serve(engine=engine)
    await cached(live, prefetch_policy="timeout=5ms")
    await cached(live)
    policy = engine.policy_of(0)
    assert policy is not None
    assert policy.patience == 0.005
    assert engine.policy_of(1) is None
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        status, answer = await live.post(path, body | {"prefetch_policy": "soon"})
        assert status == 400
        assert answer["error"]["param"] == "prefetch_policy"
        assert "best_effort, wait_complete or timeout=" in answer["error"]["message"]


async def test_flush_drops_every_tier(serve):
    engine = TieredEngine()
    live = await serve(engine=engine)
    await cached(live)
    status, answer = await live.post("/flush_cache?timeout=5", None)
    assert status == 200
    assert answer["complete"]
    assert {tier: dropped["kept_pages"] for tier, dropped in answer["tiers"].items()} == dict.fromkeys(
        ("device", "host", "disk"), 0
    )
    assert answer["tiers"]["device"]["dropped_pages"] == answer["tiers"]["host"]["dropped_pages"] == 8
    await settled(live)
    await live.post("/flush_cache", None)
    assert engine.rig.store.pages == {}
    stat = (await live.get("/cache/stat"))[1]
    assert {tier: level["used_pages"] for tier, level in stat["tiers"].items()} == dict.fromkeys(
        ("device", "host", "disk"), 0
    )
    assert await cached(live) == {"device": 0, "host": 0, "disk": 0}
    assert (await live.post("/flush_cache?tier=l2", None))[0] == 400
    assert (await live.post("/flush_cache?timeout=x", None))[0] == 400


async def test_flush_says_what_stays(serve):
    engine = TieredEngine()
    gate = threading.Event()
    live = await serve(engine=engine)
    await cached(live)
    await settled(live)
    # A load that does not end keeps its pages on the host.
    await live.post("/flush_cache?tier=device", None)
    engine.rig.mover.delay = lambda kind: 0.0 if gate.is_set() else 1e9
    loads = engine.rig.mover.load

    def load(host_rows: Sequence[int], device_pages: Sequence[int]) -> Move:
        move = loads(host_rows, device_pages)
        pending = engine.rig.mover._loads[-1]
        threading.Thread(target=lambda: (gate.wait(5), setattr(pending, "due", 0.0))).start()
        return move

    engine.rig.mover.load = load
    waiting = asyncio.create_task(cached(live))
    await eventually(lambda: bool(engine.rig.mover._loads))
    status, answer = await live.post("/flush_cache?tier=host&timeout=0", None)
    assert status == 409
    assert not answer["complete"]
    assert answer["error"]["code"] == "in_use"
    assert "host: 7 pages are in use" in answer["error"]["message"]
    assert answer["tiers"]["host"] == {"dropped_pages": 1, "kept_pages": 7, "pinned_pages": 0}
    gate.set()
    assert await waiting == {"device": 0, "host": 28, "disk": 0}


async def test_a_read_only_disk_is_not_cleared(serve):
    engine = TieredEngine()
    live = await serve(engine=engine)
    await cached(live)
    await settled(live)
    engine.tiers.store.read_only = True
    status, answer = await live.post("/cache/clear", {"tier": "disk"})
    assert status == 409
    assert answer["tiers"]["disk"]["kept_pages"] == 8
    assert "read-only" in answer["error"]["message"]
    assert len(engine.rig.store.pages) == 8


async def test_clear_by_namespace(serve):
    engine = TieredEngine()
    live = await serve(engine=engine)
    await cached(live, cache_salt="one")
    await cached(live, cache_salt="two")
    await settled(live)
    rows = (await live.get("/cache/stat"))[1]["namespaces"]
    assert [(row["device_pages"], row["host_pages"], row["disk_pages"]) for row in rows] == [(8, 8, 8)] * 2
    assert "one" not in str(rows)
    name = rows[0]["namespace"]
    status, answer = await live.post("/cache/clear", {"namespace": name[:12]})
    assert status == 200
    assert {tier: dropped["dropped_pages"] for tier, dropped in answer["tiers"].items()} == {
        "device": 8,
        "host": 8,
        "disk": 8,
    }
    assert [row["namespace"] for row in (await live.get("/cache/stat"))[1]["namespaces"]] == [
        rows[1]["namespace"]
    ]
    found = [sum((await cached(live, cache_salt=salt)).values()) for salt in ("one", "two")]
    assert sorted(found) == [0, 28]
    assert (await live.post("/cache/clear", {"namespace": "zz"}))[0] == 404
    assert (await live.post("/cache/clear", {"namespace": ""}))[0] == 404
    assert (await live.post("/cache/clear", {}))[0] == 400


async def test_warm(serve):
    live = await serve(engine=TieredEngine())
    body = {"prompts": [PROMPT, list(b"0123456789"), ""], "messages": [{"role": "user", "content": "Hi"}]}
    status, answer = await live.post("/cache/warm", body)
    assert status == 200
    first, second, third, chat = answer["items"]
    assert (first["prompt_tokens"], first["computed_tokens"], first["cached_tokens"]) == (32, 32, 0)
    assert second["prompt_tokens"] == 10
    assert third["error"]["param"] == "items[2].prompt"
    assert chat["computed_tokens"] == chat["prompt_tokens"] > 2
    assert answer["failed"] == 1
    again = (await live.post("/cache/warm", {"prompts": PROMPT}))[1]
    assert (again["computed_tokens"], again["cached_tokens"]) == (4, 28)
    assert await cached(live) == {"device": 28, "host": 0, "disk": 0}
    assert (await live.post("/cache/warm", {}))[0] == 400
    long = {
        "items": [{"token_ids": [1] * 2000}, {"token_ids": [9999]}, {"prompt": "x", "token_ids": [1]}, {}]
    }
    answer = (await live.post("/cache/warm", long))[1]
    assert [item["error"]["code"] for item in answer["items"]] == [
        "context_length_exceeded",
        None,
        None,
        None,
    ]
    assert (await live.metrics())["tierax_time_to_first_token_seconds_count"] == 1, "warming is no traffic"


async def test_warmed_chats_are_prefixes_of_real_ones(serve):
    live = await serve(engine=TieredEngine())
    messages = [{"role": "system", "content": "You are a very helpful assistant. " * 3}]
    await live.post("/cache/warm", {"messages": messages})
    answer = await live.chat(messages=[*messages, {"role": "user", "content": "Hi"}], max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100


async def test_pins_stay_and_have_a_quota(serve):
    engine = TieredEngine(pages=16, host_pages=32, disk=False)
    live = await serve(engine=engine)
    status, pin = await live.post("/cache/pin", {"prompt": PROMPT})
    assert (status, pin["pages"], pin["held_pages"], pin["computed_tokens"]) == (200, 8, 8, 32)
    for other in range(10):
        await cached(live, prompt=f"{other}" * 60)
    assert sum((await cached(live)).values()) == 28, "still there"
    listed = (await live.get("/cache/pins"))[1]
    assert (listed["pages"], listed["quota_pages"]) == (8, 16)
    assert [shown["id"] for shown in listed["pins"]] == [pin["id"]]

    again = (await live.post("/cache/pin", {"token_ids": list(PROMPT.encode())}))[1]
    assert (again["id"], again["computed_tokens"]) == (pin["id"], 4)
    # A longer one shares the pages of the first: only the four new ones count.
    longer = (await live.post("/cache/pin", {"prompt": PROMPT + "A" * 16}))[1]
    assert longer["pages"] == 12
    assert (await live.get("/cache/pins"))[1]["pages"] == 12
    status, answer = await live.post("/cache/pin", {"prompt": "B" * 20})
    assert (status, answer["error"]["code"]) == (409, "pin_quota_exceeded")
    assert "5 more pages would be pinned, but 12 of the 16" in answer["error"]["message"]
    assert engine.made[-1].tokens.tobytes() != b"B" * 20, "refused before it was computed"

    assert (await live.post("/flush_cache", None))[0] == 200, "what is pinned may stay"
    assert (await live.get("/cache/stat"))[1]["tiers"]["host"]["used_pages"] == 12
    assert (await live.post("/cache/unpin", {"id": longer["id"]}))[0] == 200
    assert (await live.post("/cache/unpin", {"prompt": PROMPT}))[1]["unpinned"]["id"] == pin["id"]
    assert (await live.post("/cache/unpin", {"prompt": PROMPT}))[0] == 404
    assert (await live.get("/cache/pins"))[1]["pages"] == 0
    await settled(live)
    engine.rig.cache.check()
    await live.post("/flush_cache", None)
    assert (await live.get("/cache/stat"))[1]["tiers"]["host"]["used_pages"] == 0


async def test_pins_without_a_host_cache(serve):
    live = await serve(engine=TieredEngine(host_pages=0, disk=False))
    status, answer = await live.post("/cache/pin", {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (409, "no_host_cache")
    live = await serve(engine=TieredEngine(), pin_quota="10%")
    assert (await live.post("/cache/pin", {"prompt": "abc"}))[1]["error"]["code"] == "too_short"
    assert (await live.post("/cache/pin", {"prompt": PROMPT}))[1]["error"]["code"] == "pin_quota_exceeded"
    assert (await live.post("/cache/pin", {"prompt": "abcdefgh"}))[0] == 200


async def test_pins_outlive_a_fault_of_the_device(serve):
    engine = TieredEngine(pages=16, host_pages=32, disk=False)
    live = await serve(engine=engine)
    await live.post("/cache/pin", {"prompt": PROMPT})
    await settled(live)
    engine.rig.device.submit_error = RuntimeError("lost")
    status, _ = await live.post("/v1/completions", {"prompt": "x" * 20, "max_tokens": 1})
    assert status == 500
    for other in range(10):
        await cached(live, prompt=f"{other}" * 60)
    listed = (await live.get("/cache/pins"))[1]
    assert listed["pins"][0]["held_pages"] == 8
    assert (await cached(live))["host"] == 28
    await settled(live)
    await live.post("/cache/unpin", {"prompt": PROMPT})
    engine.rig.cache.check()


async def test_keys_with_a_salt_share_nothing(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# tenants\nann  red\nbob  blue\nbea  blue\n\nops\n")
    live = await serve(engine=TieredEngine(pages=64, host_pages=128), api_key="admin", api_key_file=str(keys))

    async def hit(key: str, salt: str | None = None) -> int:
        fields = {} if salt is None else {"cache_salt": salt}
        found = sum((await cached(live, headers=bearer(key), **fields)).values())
        await settled(live)
        return found

    assert await hit("ann") == 0
    assert await hit("ann") == 28, "the positive control"
    assert await hit("bob") == 0
    assert await hit("bea") == 28, "two keys of one tenant"
    assert await hit("ops") == 0
    assert await hit("admin") == 28
    # Whatever salt of its own a request sends, it does not get across.
    for salt in ("red", "blue", "key:red"):
        assert await hit("ops", salt) == 0, salt
        assert await hit("bob", salt) == 0, salt
        assert await hit("bob", salt) == 28, salt
    # Nor in the lower tiers.
    for tier in ("device", "host"):
        assert (await live.post(f"/flush_cache?tier={tier}", None, headers=bearer("ops")))[0] == 200
    assert (await cached(live, headers=bearer("ann")))["disk"] == 28
    assert await hit("ann", "new") == 0


async def test_what_tenants_may_ask(serve, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text('{"ann": "red", "bob": "blue", "ops": null}')
    live = await serve(engine=TieredEngine(), api_key_file=str(keys))
    for method, path in (("POST", "/flush_cache"), ("GET", "/cache/stat"), ("POST", "/cache/clear")):
        body = {"tier": "device"} if method == "POST" else None
        assert (await live.request(method, path, body))[0] == 401
        status, answer = await live.request(method, path, body, headers=bearer("ann"))
        assert (status, answer["error"]["code"]) == (403, "operator_only"), path
        assert (await live.request(method, path, body, headers=bearer("ops")))[0] == 200
    pin = (await live.post("/cache/pin", {"prompt": PROMPT}, headers=bearer("ann")))[1]
    assert (await live.get("/cache/pins", headers=bearer("bob")))[1] == {"pins": []}
    assert (await live.post("/cache/unpin", {"id": pin["id"]}, headers=bearer("bob")))[0] == 404
    assert len((await live.get("/cache/pins", headers=bearer("ops")))[1]["pins"]) == 1
    assert (await live.get("/cache/pins", headers=bearer("ann")))[1] == {
        "pins": [{"id": pin["id"], "pages": 8, "held_pages": 8, "tokens": 32}]
    }
    assert (await live.post("/cache/unpin", {"id": pin["id"]}, headers=bearer("ann")))[0] == 200


async def test_no_route_waits_for_a_dead_engine(serve):
    live = await serve(engine=TieredEngine())
    live.thread.engine.loop.step = None
    broken = asyncio.create_task(live.post("/v1/completions", {"prompt": "x"}))
    await eventually(lambda: not live.thread.alive)
    status, answer = await asyncio.wait_for(live.get("/cache/stat"), 2)
    assert (status, answer["error"]["code"]) == (503, "engine_stopped")
    assert (await asyncio.wait_for(broken, 3))[0] == 503


async def test_metrics_of_the_tiers(serve):
    engine = TieredEngine(pages=16, host_pages=20, disk_pages=30)
    live = await serve(engine=engine)
    for name in "abcdef":
        await cached(live, prompt=name * 40)
        await settled(live)
    await cached(live, prompt="f" * 40)
    for kind, latencies in {"load": [0.0004, 0.02, 99.0], "read": [0.003]}.items():
        stats = engine.mover_stats.kinds[kind]
        stats.bytes, stats.pages = 5000, 5
        for seconds in latencies:
            stats.observe(seconds)
    engine.mover_stats.read.failures[Outcome.CORRUPT] = 2
    before = await live.metrics()
    assert before['tierax_cache_tier_hit_tokens_total{tier="device"}'] == 36
    assert before['tierax_cache_tier_query_tokens_total{tier="device"}'] == 280
    assert before['tierax_cache_tier_query_tokens_total{tier="disk"}'] == 280 - 36
    assert before['tierax_cache_capacity_bytes{tier="host"}'] == 20_000
    assert before['tierax_cache_used_bytes{tier="disk"}'] == 30_000
    assert before['tierax_pages{state="total",tier="host"}'] == 20
    assert before['tierax_cache_evicted_pages_total{reason="capacity",tier="disk"}'] >= 30
    assert before['tierax_cache_evicted_pages_total{reason="capacity",tier="host"}'] >= 40
    assert before['tierax_cache_copied_bytes_total{direction="host_to_device"}'] == 5000
    assert before['tierax_cache_copy_failed_pages_total{direction="disk_to_host",outcome="corrupt"}'] == 2
    assert before['tierax_l2_to_l1_latency_ms_bucket{le="0.5"}'] == 1
    assert before['tierax_l2_to_l1_latency_ms_bucket{le="25.0"}'] == 2
    assert before['tierax_l2_to_l1_latency_ms_bucket{le="+Inf"}'] == 3
    assert before["tierax_l2_to_l1_latency_ms_count"] == 3
    assert before["tierax_l2_to_l1_latency_ms_sum"] == pytest.approx(99_020.4)
    assert before['tierax_cache_copy_latency_ms_count{direction="disk_to_host"}'] == 1
    assert before["tierax_disk_cache_eviction_rate"] > 0.5
    assert before["tierax_prefetch_query_pages_total"] >= 54
    assert "tierax_cache_hit_rate" in before
    assert "tierax_device_busy_ratio" in before
    await live.post("/flush_cache", None)
    await cached(live, prompt="a" * 40)
    after = await live.metrics()
    assert after['tierax_cache_evicted_pages_total{reason="cleared",tier="device"}'] > 0
    assert after['tierax_cache_evicted_pages_total{reason="cleared",tier="disk"}'] == 30
    grows = [name for name in before if "_total" in name or "_bucket" in name or name.endswith("_count")]
    assert len(grows) > 60
    assert all(after[name] >= before[name] for name in grows)
