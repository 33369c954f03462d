"""How much the server takes on, and how long it waits for anybody (DEFECTS c4, h6)."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from helpers.fake_engine import say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live, eventually
from tierax.engine.config import ConfigError
from tierax.serving.config import ServerConfig
from tierax.serving.core import generation, service
from tierax.serving.core.keys import SERVICE

pytestmark = pytest.mark.asyncio

LONG = {"max_tokens": 4000, "ignore_eos": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def connect(live: Live, **options: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(live.url.rsplit(":", 1)[1]), **options)


# --- the whole server's queue


async def test_a_full_queue_refuses_before_the_body_is_read(serve):
    live = await serve(step_seconds=0.005, max_running=2, max_queued_requests=1)
    streams = [await live.open_stream(CHAT, **LONG) for _ in range(3)]
    status, answer = await live.post(CHAT, {"messages": MESSAGES})
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (
        503,
        "queue_full",
        "service_unavailable_error",
    )
    assert "1 request" in answer["error"]["message"]

    # The head of a request is enough to be refused.
    reader, writer = await connect(live)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 1)
    assert head.startswith(b"HTTP/1.1 503")
    assert b"Retry-After: 1" in head
    writer.close()
    await writer.wait_closed()

    # Everything but new calls goes on.
    assert (await live.get("/ready"))[0] == 200
    assert (await live.post("/flush_cache", None))[0] == 200
    streams.pop().close()
    await eventually(lambda: len(live.thread.running) + len(live.thread.waiting) == 2)
    again = await live.open_stream(CHAT, **LONG)
    for stream in (again, *streams):
        stream.close()
    await eventually(lambda: not live.thread.running)
    await live.chat(max_tokens=1)


async def test_the_choices_of_a_call_count_each(serve):
    live = await serve(step_seconds=0.005, max_running=2, max_queued_requests=2)
    stream = await live.open_stream(COMPLETIONS, n=4, **LONG)
    status, answer = await live.post(COMPLETIONS, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "queue_full")
    stream.close()
    await eventually(lambda: not live.thread.running)
    await live.complete(max_tokens=1)


async def test_a_burst_is_cut_at_the_bound(serve):
    live = await serve(step_seconds=0.002, max_running=4, max_queued_requests=6)
    answers = await asyncio.gather(
        *(live.post(COMPLETIONS, {"prompt": f"call {n}", "max_tokens": 30}) for n in range(60))
    )
    statuses = [status for status, _ in answers]
    assert statuses.count(200) >= 10
    assert set(statuses) == {200, 503}
    assert len(live.engine.made) == statuses.count(200)
    await live.complete(max_tokens=1)


# --- the share of a key


async def test_a_key_has_its_own_share(serve, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{"key": "few", "max_concurrency": 2}, {"key": "many"}]))
    live = await serve(step_seconds=0.005, api_key_file=str(path))

    async def stream(key: str):
        return await live.session.post(
            live.url + CHAT, json={"messages": MESSAGES, "stream": True, **LONG}, headers=bearer(key)
        )

    first, second, third = [await stream("few") for _ in range(3)]
    assert [answer.status for answer in (first, second, third)] == [200, 200, 429]
    assert third.headers["Retry-After"] == "1"
    error = (await third.json())["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "concurrency_limit")
    assert "2 calls" in error["message"]
    # Looking is free, and others are not concerned.
    assert (await live.get("/v1/models", headers=bearer("few")))[0] == 200
    others = [await stream("many") for _ in range(3)]
    assert {answer.status for answer in others} == {200}
    first.close()
    await eventually(lambda: live.engine.stats.running == 4)
    again = await stream("few")
    assert again.status == 200
    # A call that is refused for another reason has not taken a share for good.
    again.close()
    await eventually(lambda: live.engine.stats.running == 4)
    for _ in range(3):
        assert (await live.post(CHAT, {"messages": "?"}, headers=bearer("few")))[0] == 400
    for answer in (second, *others):
        answer.close()


# --- time


async def test_a_call_that_takes_too_long_ends(serve, monkeypatch):
    monkeypatch.setattr(service, "WATCH_INTERVAL", 0.02)
    live = await serve(step_seconds=0.01, max_running=2, request_timeout=0.3)
    stream = asyncio.create_task(live.stream(CHAT, **LONG))
    whole = asyncio.create_task(live.post(CHAT, {"messages": MESSAGES, **LONG}))
    await eventually(lambda: len(live.thread.running) == 2)
    queued = asyncio.create_task(live.post(CHAT, {"messages": MESSAGES, **LONG}))
    started = time.monotonic()
    for status, answer in await asyncio.gather(whole, queued):
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (504, "timeout", "timeout_error")
        assert "0.3 seconds" in answer["error"]["message"]
    events = await stream
    assert events[-1]["error"]["code"] == "timeout"
    assert len(events) > 3, "what was generated in time is told"
    assert time.monotonic() - started < 4.0
    await eventually(lambda: live.engine.stats.finished == {"abort": 3})
    assert (await live.complete(max_tokens=3))["usage"]["completion_tokens"] == 3


async def test_a_body_must_come_in_time(serve):
    live = await serve(say("x"), read_timeout=0.3)
    body = json.dumps({"messages": MESSAGES}).encode()
    for sent in (b"", body[:5]):
        reader, writer = await connect(live)
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + sent
        )
        # A byte now and then does not help.
        for byte in body[len(sent) : len(sent) + 5]:
            await asyncio.sleep(0.1)
            writer.write(bytes([byte]))
        answer = await asyncio.wait_for(reader.read(2**16), 2)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"body_timeout"' in answer
        writer.close()
    assert live.engine.made == []
    await live.chat()


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
async def test_who_sends_no_whole_head_is_let_go(serve, sent):
    live = await serve(say("x"), idle_timeout=0.3)
    reader, writer = await connect(live)
    writer.write(sent)

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.05)
            if sent:
                writer.write(b"a")

    started = time.monotonic()
    dripping = asyncio.create_task(drip())
    assert await asyncio.wait_for(reader.read(), 60) == b"", "however long it goes on like that"
    assert time.monotonic() - started > 0.2
    dripping.cancel()
    writer.close()


async def test_an_idle_connection_is_kept_for_a_while_only(serve):
    live = await serve(say("x"), step_seconds=0.3, idle_timeout=0.5)
    reader, writer = await connect(live)
    request = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(3):
        writer.write(request)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.15)
    # A call that takes longer than that is not idle.
    body = json.dumps({"messages": MESSAGES}).encode()
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    rest = await asyncio.wait_for(reader.read(), 5)
    assert rest.endswith(b"}}}"), "closed after the answer"
    writer.close()


# --- clients that do not read


async def stalled(live: Live, **fields: object) -> socket.socket:
    """A stream that nobody reads, over a socket with small buffers."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", int(live.url.rsplit(":", 1)[1])))
    body = json.dumps(
        {"messages": MESSAGES, "stream": True, "logprobs": True, "top_logprobs": 20, **LONG, **fields}
    )
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(sock, (head + body).encode())
    return sock


async def test_a_client_that_does_not_read_is_cut_off(serve):
    live = await serve(step_seconds=0.001, write_timeout=0.5)
    sock = await stalled(live, n=8)
    await eventually(lambda: live.engine.stats.running == 8)
    await eventually(lambda: live.engine.stats.finished == {"abort": 8}, seconds=20)
    # The connection is gone with all that was kept for it.
    await eventually(lambda: not live.runner.server.connections, seconds=10)
    sock.close()
    await live.session.close()


async def test_what_piles_up_for_a_client_is_bounded(serve, monkeypatch):
    monkeypatch.setattr(generation, "MAX_UNREAD", 300)
    live = await serve(step_seconds=0.0005, write_timeout=30)
    reading = asyncio.create_task(live.stream(CHAT, max_tokens=1500, ignore_eos=True))
    sock = await stalled(live, n=8)
    await eventually(lambda: live.engine.stats.running == 9)
    opened = [g for g in live.app[SERVICE]._open if g.num_choices == 8]
    await eventually(lambda: live.engine.stats.finished.get("abort") == 8, seconds=20)
    assert len(opened[0]._pending) <= 301
    sock.close()
    events = await asyncio.wait_for(reading, 30)
    assert "error" not in events[-1], "those who read are not concerned"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_queued_requests", -1),
        ("request_timeout", -1.0),
        ("read_timeout", 0.0),
        ("write_timeout", float("inf")),
        ("idle_timeout", float("nan")),
    ],
)
async def test_bounds_that_make_no_sense(field, value):
    with pytest.raises(ConfigError, match=field):
        ServerConfig(**{field: value})


async def test_a_key_bounds_the_priorities_of_its_requests(serve, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{"key": "free"}, {"key": "background", "priority": 10}]))
    live = await serve(say("x"), api_key_file=str(path))
    for path in (CHAT, COMPLETIONS):
        body: dict[str, object] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
        for key, wanted, got in (
            ("free", None, 0),
            ("free", -7, -7),
            ("background", None, 10),
            ("background", -7, 10),
            ("background", 99, 99),
        ):
            assert (await live.post(path, body | {"priority": wanted}, headers=bearer(key)))[0] == 200
            assert live.engine.made[-1].priority == got
