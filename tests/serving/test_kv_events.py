"""KV events on real sockets: the form of messages, replay, gaps, what subscribers cannot do, and whose tokens are told."""

from __future__ import annotations

import asyncio
import builtins
import json
import runpy
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.live_server import eventually
from helpers.tier_mirror import STORAGE, TierMirror, blocks_in
from helpers.tiered_engine import TieredEngine
from tierax.cache.manager import CacheManager
from tierax.cache.page_events import Cleared, PageLog, Removed, Stored
from tierax.engine.config import ConfigError
from tierax.serving.config import ServerConfig
from tierax.serving.events.config import KvEventsConfig
from tierax.serving.events.messages import block_hash, encode_batch
from tierax.serving.events.publisher import END, Publisher, check_endpoints

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_events.py"
KEYS = (bytes(range(16)), bytes(range(1, 17)))
HASHES = [0x08090A0B0C0D0E0F, 0x090A0B0C0D0E0F10]


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq.Context() as context:
        context.linger = 0
        yield context


class Subscriber:
    """Hears messages and keeps a mirror of them."""

    def __init__(self, context: Any, endpoint: str, topic: bytes = b"") -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(endpoint)
        self.mirror = TierMirror()
        self.sequences: list[int] = []

    def hear(self, timeout_ms: int = 50) -> None:
        """All that has come, and what comes within the time."""
        while self.socket.poll(timeout_ms):
            _, sequence, payload = self.socket.recv_multipart()
            self.sequences.append(int.from_bytes(sequence, "big"))
            self.mirror.take(payload)


def ask_again(context: Any, endpoint: str, start: int) -> list[tuple[int, bytes]]:
    """The messages of a replay, as vLLM's subscribers ask for one."""
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while True:
            assert socket.poll(5000), "the replay has no end"
            empty, sequence, payload = socket.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(sequence, "big"), payload))


def test_messages_have_the_fields_of_other_engines_in_their_order() -> None:
    events = [
        Cleared(),
        Stored(0, KEYS, None, array("i", [1, 2, 3, 4]).tobytes()),
        Stored(2, KEYS[1:], KEYS[0], b""),
        Removed(1, KEYS[:1]),
    ]
    as_arrays = msgspec.msgpack.decode(encode_batch(events, ts=7.25, page_size=2, encoding="array"))
    assert as_arrays == [
        7.25,
        [
            ["AllBlocksCleared"],
            ["BlockStored", HASHES, None, [1, 2, 3, 4], 2, None, "GPU", None],
            ["BlockStored", HASHES[1:], HASHES[0], [], 2, None, "STORAGE", None],
            ["BlockRemoved", HASHES[:1], "CPU"],
        ],
        0,
    ]
    as_maps = msgspec.msgpack.decode(encode_batch(events, ts=7.25, page_size=2, encoding="map"))
    assert as_maps[1][0] == {"type": "AllBlocksCleared"}
    assert as_maps[1][2] == {
        "type": "BlockStored",
        "block_hashes": HASHES[1:],
        "parent_block_hash": HASHES[0],
        "token_ids": [],
        "block_size": 2,
        "lora_id": None,
        "medium": "STORAGE",
        "lora_name": None,
    }
    assert as_maps[1][3] == {"type": "BlockRemoved", "block_hashes": HASHES[:1], "medium": "CPU"}


class Event(msgspec.Struct, tag=True, array_like=True, omit_defaults=True):
    """The types by which vLLM's own subscribers decode, by its names and order of fields."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def test_typed_subscribers_decode_a_batch() -> None:
    events = [Cleared(), Stored(1, KEYS, None, array("i", [1, 2, 3, 4]).tobytes()), Removed(0, KEYS)]
    batch = msgspec.msgpack.decode(
        encode_batch(events, ts=7.25, page_size=2, encoding="array"), type=Batch, strict=True
    )
    assert batch.data_parallel_rank == 0
    assert batch.events[1:] == [
        BlockStored(HASHES, None, [1, 2, 3, 4], 2, None, "CPU", None),
        BlockRemoved(HASHES, "GPU"),
    ]


def test_what_gets_lost_is_known_and_mended_by_telling_all() -> None:
    cache, log, mirror = CacheManager(8, 1, host_pages=4), PageLog(2, told={b""}), TierMirror()
    cache.tiers.listen(log)
    for first in range(4):
        lease = cache.open(b"", array("i", [first]), 1)
        assert cache.grow(lease, 1)
        cache.commit(lease, array("i", [first]), 1)
        cache.release(lease)
    taken = log.take(1)
    assert len(taken.events) == 1
    assert not taken.lost, "nothing is missing before these"
    taken = log.take(10)
    assert len(taken.events) == 1
    assert taken.lost
    assert log.take(10) == ([], True)
    log.tell_all(cache.tiers, None)
    taken = log.take(10)
    assert not taken.lost
    assert taken.events[0] == Cleared()
    mirror.hear(taken.events, page_size=1)
    assert mirror.blocks == {**blocks_in(cache.tiers), STORAGE: set()}
    assert len(mirror.blocks["GPU"]) == 4
    log.close()
    cache.clear()
    assert log.take(10) == ([], False)


def test_publisher_leaves_a_gap_where_its_log_was_full(context: Any, tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    cache, log = CacheManager(8, 1), PageLog(2, told={b""})
    cache.tiers.listen(log)

    def retell() -> Future[Any]:
        done: Future[Any] = Future()
        log.tell_all(cache.tiers, None)
        done.set_result(None)
        return done

    config = KvEventsConfig(endpoint=endpoint, replay_endpoint=replay, topic="kv@a@m", buffer_steps=2)
    publisher = Publisher(config, log, page_size=1, retell=retell, now=lambda: 3.0)
    subscriber = Subscriber(context, endpoint, b"kv@a@")
    with subscriber.socket:
        subscriber.hear(200)
        # Six pages before anybody takes the events: four find no room.
        lease = cache.open(b"", array("i", range(6)), 6)
        assert cache.grow(lease, 6)
        for end in range(1, 7):
            cache.commit(lease, array("i", range(6)), end)
        publisher._publish()
        publisher._publish()
        subscriber.hear(200)
        assert subscriber.sequences == [0, 2], "1 stands for what is missing"
        assert subscriber.mirror.cleared == 1
        assert len(subscriber.mirror.blocks["GPU"]) == 6
    publisher.start()
    assert [sequence for sequence, _ in ask_again(context, replay, 0)] == [2, 3], "the latest two are kept"
    assert ask_again(context, replay, 9) == []
    publisher.close()


def test_subscriber_that_does_not_read_holds_nobody_up_and_catches_up_by_a_replay(
    context: Any, tmp_path: Path
) -> None:
    endpoint, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    pages, size = 4000, 64
    cache, log = CacheManager(pages, size), PageLog(10**5, told={b""})
    cache.tiers.listen(log)
    config = KvEventsConfig(endpoint=endpoint, replay_endpoint=replay, hwm=1)
    publisher = Publisher(config, log, page_size=size, retell=Future, now=lambda: 3.0)
    subscriber = Subscriber(context, endpoint)
    with subscriber.socket:
        subscriber.hear(200)
        tokens = array("i", range(pages * size))
        lease = cache.open(b"", tokens, len(tokens))
        assert cache.grow(lease, len(tokens))
        for end in range(size, len(tokens) + 1, size):
            cache.commit(lease, tokens, end)
            publisher._publish()
        assert publisher._sequence == pages, "every message was sent, whoever reads"
        heard = []
        while subscriber.socket.poll(200):
            heard.append(int.from_bytes(subscriber.socket.recv_multipart()[1], "big"))
        assert len(heard) < pages, "the subscriber was not slow enough to miss anything"
    publisher.start()
    mirror = TierMirror()
    for _, payload in ask_again(context, replay, 0):
        mirror.take(payload)
    assert len(mirror.blocks["GPU"]) == pages
    publisher.close()


@pytest.mark.asyncio
async def test_subscriber_knows_what_a_server_has_and_may_ask_for_what_it_missed(
    serve: Any, context: Any, tmp_path: Path
) -> None:
    engine = TieredEngine()
    endpoint, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    settings = {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
    live = await serve(engine=engine, kv_events=json.dumps(settings))
    subscriber = Subscriber(context, endpoint)
    with subscriber.socket:
        await asyncio.to_thread(subscriber.hear, 200)
        body = {"model": "fake", "prompt": "a prompt of some pages", "max_tokens": 9, "temperature": 0}
        assert (await live.post("/v1/completions", body))[0] == 200
        assert (await live.post("/v1/completions", body | {"cache_salt": "mine"}))[0] == 200
        index = engine.rig.index
        assert index is not None
        await eventually(lambda: engine.loop.idle)
        await asyncio.to_thread(subscriber.hear, 200)
        late, replayed = TierMirror(), await asyncio.to_thread(ask_again, context, replay, 0)
        for _, payload in replayed:
            late.take(payload)
        on_disk = {block_hash(key.key) for key in index.stored_keys()}
        assert on_disk
        view = runpy.run_path(str(EXAMPLE))["View"]()
        for sequence, payload in replayed:
            view.take(sequence, payload)
        assert view.tiers == late.blocks, "as the example sees it"
        assert late.blocks == {**blocks_in(engine.cache.tiers), STORAGE: on_disk}
        # It subscribed after the first message, and knows by the sequence that it missed it.
        assert subscriber.sequences[-1] == replayed[-1][0] == len(replayed) - 1
        # One of the two had a salt: its tokens are nobody's business.
        held = late.blocks["GPU"]
        assert 0 < len(late.tokens) < len(held | late.blocks["CPU"])
        assert list(b"a pr") in late.tokens.values()
        assert (await live.metrics())["tierax_kv_event_batches_total"] == len(replayed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://*:5557", KvEventsConfig()),
        ("ipc:///run/kv", KvEventsConfig(endpoint="ipc:///run/kv")),
        ('{"publisher": "null"}', None),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', None),
        (
            '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://router:5557", "topic":'
            ' "kv@10.0.0.1@m", "replay_endpoint": "tcp://*:5558", "buffer_steps": 5, "hwm": 7, "max_queue_size": 9}',
            KvEventsConfig(
                endpoint="tcp://router:5557",
                topic="kv@10.0.0.1@m",
                replay_endpoint="tcp://*:5558",
                buffer_steps=5,
                hwm=7,
                max_queue_size=9,
            ),
        ),
    ],
)
def test_settings_in_the_spelling_of_other_engines(text: str, expected: KvEventsConfig | None) -> None:
    assert ServerConfig(kv_events=text).kv_events_config() == expected


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [("tcp://*:1", True), ("tcp://0.0.0.0:1", True), ("ipc:///x", True), ("tcp://router.llm-d:5557", False)],
)
def test_publisher_binds_here_and_connects_elsewhere(endpoint: str, binds: bool) -> None:
    assert KvEventsConfig(endpoint=endpoint).binds is binds


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5557", "must be like tcp"),
        ("tcp://host", "must be like tcp"),
        ('{"endpoint": 5}', "must be like tcp"),
        ('{"endpoint"', "not a JSON object"),
        ('{"publisher": "kafka"}', "zmq or null"),
        ('{"enable_kv_cache_events": "yes"}', "true or false"),
        ('{"port": 1}', "there is no 'port'"),
        ('{"hwm": 0}', "hwm 0 must be"),
        ('{"topic": 1}', "must be a text"),
        ('{"encoding": "xml"}', "array, map"),
        ('{"replay_endpoint": "tcp://*:5557"}', "must differ"),
    ],
)
def test_mistakes_are_one_line_that_says_which(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServerConfig(kv_events=text)


def test_endpoint_in_use_and_absent_package_are_told_before_a_model_is_loaded(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match=f"tcp://\\*:{port}: Address already in use"):
            check_endpoints(KvEventsConfig(endpoint=f"tcp://*:{port}"))
    real = builtins.__import__

    def without_zmq(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "zmq":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_zmq)
    with pytest.raises(ConfigError, match=r"pip install 'tierax\[events\]'"):
        check_endpoints(KvEventsConfig())
