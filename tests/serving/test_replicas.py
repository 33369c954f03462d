"""Several copies of a model behind one server: on the real loops, caches and threads, over devices in plain Python
(DEFECTS a3, h1, h3, k)."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from helpers.fake_mover import FakeStore
from helpers.live_server import Live, eventually
from helpers.tiered_engine import TieredEngine
from tierax.engine.engine import Engine
from tierax.engine.offline import Batch
from tierax.engine.replica_loop import ReplicaLoop
from tierax.engine.replicas import Replicas
from tierax.engine.request import SamplingParams
from tierax.serving.events.config import KvEventsConfig

pytestmark = pytest.mark.asyncio

PROMPT = "abcdefghijklmnopqrstuvwxyz012345"
"""Eight pages of four tokens."""
COLD = {"device": 0, "host": 0, "disk": 0}


def copies(count: int = 2, **options: Any) -> Replicas:
    """Engines over one store, which know nothing of what the others write there."""
    store = FakeStore()
    engines = [TieredEngine(store=store, shared=True, **options) for _ in range(count)]
    for engine in engines:
        engine.config = engines[0].config
    return Replicas(cast(list[Engine], engines))


def engine_of(live: Live, replica: int) -> Any:
    return live.thread.replicas[replica].engine


async def settled(live: Live) -> None:
    """Until nothing moves between the tiers any more."""
    await eventually(lambda: all(thread.engine.loop.idle for thread in live.thread.replicas))


async def cached(live: Live, prompt: str = PROMPT, **fields: Any) -> dict[str, int]:
    """Completes a prompt; where it was found."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0} | fields
    status, answer = await live.post("/v1/completions", body)
    assert status == 200, answer
    await settled(live)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]


@contextmanager
def held(live: Live) -> Iterator[None]:
    """No copy takes a step."""
    gate = threading.Event()
    for thread in live.thread.replicas:
        thread.call(lambda: gate.wait(10))
    try:
        yield
    finally:
        gate.set()


def waiting(live: Live) -> list[bool]:
    """Which copies have a request under way."""
    return [load > 0 for load in live.thread.router.loads]


async def test_a_second_turn_goes_to_where_the_first_was(serve):
    live = await serve(engine=copies())
    other = PROMPT[::-1]
    assert await cached(live) == await cached(live, other) == COLD
    prompts = [thread.stats.prompt_tokens for thread in live.thread.replicas]
    assert prompts == [32, 32], "two conversations, a copy for each"
    for prompt in (PROMPT, other):
        assert await cached(live, prompt + "and so on") == COLD | {"device": 32}
    assert [thread.stats.cached_tokens for thread in live.thread.replicas] == [32, 32]
    assert waiting(live) == [False, False]


async def test_what_one_copy_has_stored_the_other_finds_on_the_disk(serve):
    live = await serve(engine=copies())
    assert await cached(live) == COLD
    # Its copy has much to do.
    names = live.thread.engine.cache.page_names(b"", array("i", list(PROMPT.encode())), 8)
    visit = live.thread.router.route([name.key for name in names], 4000)
    assert live.thread.replicas[visit.replica].stats.prompt_tokens == 32
    assert await cached(live) == COLD | {"disk": 28}
    assert [thread.stats.prompt_tokens for thread in live.thread.replicas] == [32, 32]
    live.thread.router.end(visit)


async def test_a_fault_of_one_copy_is_nothing_to_the_other(serve):
    live = await serve(engine=copies())
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with held(live):
        answers = [
            asyncio.create_task(live.post("/v1/completions", body | {"prompt": prompt}))
            for prompt in (PROMPT, PROMPT[::-1])
        ]
        await eventually(lambda: waiting(live) == [True, True])
        engine_of(live, 1).rig.device.submit_error = RuntimeError("lost")
    statuses = sorted([(await answer)[0] for answer in answers])
    assert statuses == [200, 500]
    assert [thread.stats.faults for thread in live.thread.replicas] == [0, 1]
    assert (await live.get("/ready"))[0] == 200
    assert (await live.metrics())['tierax_replica_faults_total{replica="1"}'] == 1
    assert waiting(live) == [False, False]
    for prompt in (PROMPT, PROMPT[::-1]):
        await cached(live, prompt)


async def test_an_abort_ends_the_call_that_it_names(serve):
    live = await serve(engine=copies())
    with held(live):
        answers = [
            asyncio.create_task(
                live.post("/generate", {"text": text, "rid": name, "sampling_params": {"max_new_tokens": 4}})
            )
            for name, text in (("first", PROMPT), ("second", PROMPT[::-1]))
        ]
        await eventually(lambda: waiting(live) == [True, True])
        assert (await live.post("/abort_request", {"rid": "second"}))[0] == 200
    reasons = [(await answer)[1]["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons == ["length", "abort"]
    assert waiting(live) == [False, False]


async def test_numbers_are_those_of_all_copies(serve):
    live = await serve(engine=copies(3))
    for number in range(3):
        await cached(live, f"{number}{number}{PROMPT}")
    assert [thread.stats.prompt_tokens for thread in live.thread.replicas] == [34, 34, 34]
    metrics = await live.metrics()
    assert metrics["tierax_cache_query_tokens_total"] == 102
    assert metrics['tierax_replica_cache_query_tokens_total{replica="2"}'] == 34
    one = engine_of(live, 0).cache
    assert metrics['tierax_pages{state="total",tier="device"}'] == 3 * one.num_pages
    stat = (await live.get("/cache/stat"))[1]
    assert stat["tiers"]["device"]["used_pages"] == metrics['tierax_cache_used_pages{tier="device"}'] == 24
    assert stat["tiers"]["host"]["total_pages"] == 3 * one.host.num_pages
    assert stat["tokens"]["queries"] == 102
    (namespace,) = stat["namespaces"]
    assert namespace["device_pages"] == 24
    info = (await live.get("/server_info"))[1]
    assert info["max_total_tokens"] == 3 * one.capacity_tokens
    ranks = (await live.get("/get_load"))[1]
    assert [rank["dp_rank"] for rank in ranks] == [0, 1, 2]
    picture = (await live.get("/dashboard/tree"))[1]
    rows = [dict(zip(picture["columns"], row, strict=True)) for row in picture["nodes"]]
    assert sorted(row["parent"] for row in rows) == [-3, -2, -1]
    assert sum(row["device"] for row in rows) == 24
    data = (await live.get("/dashboard/data"))[1]
    assert data["totals"]["prompt"] == 102


async def test_tenants_share_nothing_whichever_copy_they_meet_at(serve):
    live = await serve(engine=copies())
    found = [
        sum((await cached(live, cache_salt=salt)).values()) for salt in ("one", "one", "two", None, "one")
    ]
    assert found == [0, 28, 0, 0, 28]


async def test_a_flush_says_what_stays_at_any_copy(serve):
    live = await serve(engine=copies())
    await cached(live)
    await cached(live, PROMPT[::-1])
    thread = live.thread.replicas[1]
    cache = thread.engine.cache
    tokens = array("i", list(PROMPT[::-1].encode()))
    if not cache.match_length(b"", tokens):
        tokens = array("i", list(PROMPT.encode()))
    lease = await asyncio.wrap_future(thread.call(lambda: cache.open(b"", tokens, len(tokens))))
    status, told = await live.post("/flush_cache?tier=device&timeout=0", None)
    assert (status, told["error"]["code"], told["complete"]) == (409, "in_use", False)
    assert told["tiers"]["device"] == {"dropped_pages": 8, "kept_pages": 8, "pinned_pages": 0}
    await asyncio.wrap_future(thread.call(lambda: cache.release(lease)))
    assert (await live.post("/flush_cache", None))[0] == 200


async def test_a_copy_that_hangs_shows(serve, monkeypatch: pytest.MonkeyPatch):
    live = await serve(engine=copies())
    monkeypatch.setattr("tierax.serving.app.ENGINE_PATIENCE", 0.1)
    gate = threading.Event()
    live.thread.replicas[1].call(lambda: gate.wait(10))
    try:
        assert (await live.get("/health_generate"))[0] == 503
    finally:
        gate.set()
    assert (await live.get("/health_generate"))[0] == 200


async def test_a_flush_empties_all_copies(serve):
    live = await serve(engine=copies())
    await cached(live)
    await cached(live, PROMPT[::-1])
    status, told = await live.post("/flush_cache?tier=device", None)
    assert (status, told["tiers"]["device"]["dropped_pages"]) == (200, 16)
    name = (await live.get("/cache/stat"))[1]["namespaces"][0]["namespace"]
    status, told = await live.post("/cache/clear", {"namespace": name[:6]})
    assert (status, told["tiers"]["host"]["dropped_pages"]) == (200, 16)
    assert (await live.post("/cache/clear", {"namespace": "ffffffff"}))[0] == 404
    assert [len(view) for view in live.thread.router._views] == [0, 0]
    assert await cached(live) == COLD


async def test_a_pin_is_where_its_pages_are(serve):
    live = await serve(engine=copies())
    await cached(live, PROMPT[::-1])
    await cached(live)
    status, pin = await live.post("/cache/pin", {"prompt": PROMPT})
    assert (status, pin["held_pages"]) == (200, 8)
    assert pin["computed_tokens"] <= 4
    assert (await live.post("/cache/pin", {"prompt": PROMPT}))[1]["id"] == pin["id"]
    listed = (await live.get("/cache/pins"))[1]
    assert [one["id"] for one in listed["pins"]] == [pin["id"]]
    assert listed["quota_pages"] == 2 * (32 // 2)
    assert (await live.post("/flush_cache?tier=host", None))[0] == 200
    assert sum((await cached(live)).values()) == 28
    assert (await live.post("/cache/unpin", {"id": pin["id"]}))[0] == 200
    assert (await live.post("/cache/unpin", {"id": pin["id"]}))[0] == 404
    status, refused = await live.post("/cache/pin", {"prompt": "abc"})
    assert (status, refused["error"]["code"]) == (409, "too_short")


async def test_a_copy_whose_thread_has_ended_ends_the_server(serve):
    live = await serve(engine=copies())
    await asyncio.to_thread(live.thread.replicas[1].close, 0.0)
    assert (await live.get("/health"))[0] == 503
    status, answer = await live.post("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "engine_stopped")
    assert (await live.post("/flush_cache", None))[0] == 503


async def test_each_copy_publishes_its_own_pages(serve, tmp_path: Path):
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    msgpack = pytest.importorskip("msgspec").msgpack
    endpoint = f"ipc://{tmp_path}/pub"
    with zmq.Context() as context:
        sockets = []
        for name in (endpoint, f"{endpoint}_dp1"):
            socket = context.socket(zmq.SUB)
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(name)
            sockets.append(socket)
        live = await serve(engine=copies(), kv_events=json.dumps({"endpoint": endpoint}))
        await asyncio.sleep(0.2)
        await cached(live)
        await cached(live, PROMPT[::-1])
        await asyncio.sleep(0.2)
        for rank, socket in enumerate(sockets):
            stored = 0
            while socket.poll(20):
                _, events, told_rank = msgpack.decode(socket.recv_multipart()[2])
                assert told_rank == rank
                stored += sum(
                    len(event[1]) for event in events if event[0] == "BlockStored" and event[6] == "GPU"
                )
            assert stored == 8
            socket.close()
    assert (await live.metrics())["tierax_kv_events_total"] >= 2


async def test_ports_of_events_are_counted_up_and_other_names_get_a_suffix():
    config = KvEventsConfig(endpoint="tcp://*:5557", replay_endpoint="ipc:///x").of_rank(2)
    assert (config.endpoint, config.replay_endpoint) == ("tcp://*:5559", "ipc:///x_dp2")


class Bar:
    def update(self, count: int = 1) -> None: ...
    def set_postfix_str(self, text: str, refresh: bool) -> None: ...


async def test_a_script_is_told_when_a_copy_has_ended():
    thread = copies()
    thread.warm_up()
    thread.replicas[1].close(0.0)
    params = SamplingParams(max_tokens=3, temperature=0, n=4)
    try:
        batch = Batch(thread.engine, ReplicaLoop(thread), "b", cast(Any, Bar()), None)
        with pytest.raises(RuntimeError, match="a copy of the model has ended"):
            await asyncio.to_thread(batch.run, [lambda: [1, 2, 3]], [params], lambda: False)
    finally:
        thread.close(0.0)


async def test_a_script_turns_all_copies_as_one_loop():
    thread = copies()
    thread.warm_up()
    loop = ReplicaLoop(thread)
    prompts = [[*f"{number}{PROMPT}".encode()] for number in range(6)]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, n=2)
    try:
        batch = Batch(thread.engine, loop, "b", cast(Any, Bar()), None)
        outputs = await asyncio.to_thread(
            batch.run, [lambda p=p: p for p in prompts], [params] * 6, lambda: False
        )
        assert [out.prompt_token_ids for out in outputs] == prompts
        assert all(len(choice.token_ids) == 3 for out in outputs for choice in out.choices)
        assert [out.error for out in outputs] == [None] * 6
        assert min(one.stats.prompt_tokens for one in thread.replicas) > 0
        assert loop.idle
    finally:
        thread.close()
