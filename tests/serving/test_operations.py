"""Disconnects, health, keys, shutdown and metrics (DEFECTS c4, h1 to h5)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from helpers.byte_tokenizer import EOS
from helpers.fake_engine import FakeEngine, FakeEngineThread, say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, events_of, eventually
from tierax.serving.config import ServerConfig
from tierax.serving.core.keys import SERVICE
from tierax.serving.http.errors import unavailable
from tierax.serving.observe.metrics import BUCKETS, ServingMetrics
from tierax.serving.server import bind, serve

pytestmark = pytest.mark.asyncio

LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_leaving_a_stream_aborts_it(serve, path):
    live = await serve(step_seconds=0.005)
    response = await live.open_stream(path, n=2, **LONG)
    for _ in range(4):
        await response.content.readuntil(b"\n\n")
    assert live.engine.stats.running == 2
    response.close()
    await eventually(lambda: live.engine.stats.running == 0)
    assert live.engine.stats.finished == {"abort": 2}
    samples = await live.metrics()
    assert samples["tierax_requests_aborted_total"] == 2
    assert samples["tierax_requests_running"] == 0
    assert (await live.complete(max_tokens=2))["choices"][0]["finish_reason"] == "length"


async def leave(live, body):
    """Sends a call that does not stream and closes its socket after 50 ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(live.url.rsplit(":", 1)[1]))
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    assert await reader.read() == b""


async def test_leaving_a_whole_answer_aborts_it(serve):
    live = await serve(step_seconds=0.005)
    await leave(live, {"messages": MESSAGES, **LONG})
    await eventually(lambda: live.engine.stats.finished == {"abort": 1})


async def test_leaving_the_queue_aborts_too(serve):
    live = await serve(step_seconds=0.005, max_running=1)
    response = await live.open_stream(CHAT, **LONG)
    await leave(live, {"messages": MESSAGES, **LONG})
    await eventually(lambda: live.engine.stats.finished == {"abort": 1})
    assert len(live.thread.running) == 1
    assert not live.thread.waiting
    response.close()


async def test_leaving_while_the_prompt_is_prepared_submits_nothing(serve, monkeypatch):
    engine = FakeEngine()
    encode = engine.tokenizer.encode
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *a, **k: (time.sleep(0.2), encode(*a, **k))[1])
    live = await serve(engine=engine)
    await leave(live, {"messages": MESSAGES, **LONG})
    await asyncio.sleep(0.3)
    assert engine.made == []


async def test_a_mix_of_leavers_and_mistakes_leaves_nothing_behind(serve):
    engine = FakeEngine(lambda request, index: [*request.tokens[: request.num_prompt] * 20, EOS])
    live = await serve(engine=engine, step_seconds=0.001, max_running=8)
    tasks_before = len(asyncio.all_tasks())

    async def one(number: int) -> None:
        prompt = f"call {number}."
        if number % 5 == 0:
            assert (await live.post(COMPLETIONS, {"prompt": prompt, "top_p": 7}))[0] == 400
            return
        response = await live.open_stream(COMPLETIONS, prompt=prompt, max_tokens=60)
        if number % 3 == 0:
            await asyncio.sleep(number % 7 * 0.01)
            response.close()
            return
        texts = [choice["text"] for chunk in events_of(await response.text()) for choice in chunk["choices"]]
        assert "".join(texts) == (prompt * 20)[:60]

    await asyncio.gather(*(one(number) for number in range(90)))
    await eventually(lambda: not live.thread.running and not live.thread.waiting)
    finished = engine.stats.finished
    assert sum(finished.values()) == len(engine.made) <= 72
    assert finished["length"] >= 48
    # Nothing runs on but the idle connections of the session.
    assert live.session.connector is not None
    await live.session.connector.close()
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks_before)


async def test_health_follows_the_loop(serve):
    live = await serve()
    assert (await live.get("/health"))[0] == 200
    assert (await live.get("/ready"))[0] == 200
    response = await live.open_stream(CHAT, **LONG)
    live.thread.kill()
    assert (await live.get("/health"))[0] == 503
    assert (await live.get("/ready"))[0] == 503
    # Nobody would ever answer the open stream: it ends with an error.
    last = events_of(await asyncio.wait_for(response.text(), 2))[-1]
    assert last["error"]["code"] == "engine_stopped"
    status, answer = await live.post(CHAT, {"messages": MESSAGES})
    assert (status, answer["error"]["code"]) == (503, "engine_stopped")


async def test_a_hung_loop_is_not_live(serve):
    live = await serve(step_seconds=0.01)
    response = await live.open_stream(CHAT, max_tokens=100, ignore_eos=True)
    live.thread.heartbeat_age = lambda: 1000.0
    assert (await live.get("/health"))[0] == 503
    assert (await live.get("/ready"))[0] == 503
    # It may come back: what runs is not given up.
    assert "error" not in events_of(await response.text())[-1]


async def test_not_ready_before_warm_up(serve):
    live = await serve(say("x"))
    live.thread.is_ready = False
    assert (await live.get("/health"))[0] == 200
    assert (await live.get("/ready"))[0] == 503
    status, answer = await live.post(COMPLETIONS, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    live.thread.is_ready = True
    assert (await live.get("/ready"))[0] == 200
    await live.complete()


async def test_probes_ask_nothing_of_a_stalled_engine(serve):
    live = await serve(say("x"))
    live.thread.hold()
    stalled = asyncio.create_task(live.complete())
    await eventually(lambda: live.engine.stats.waiting == 1 or bool(live.thread.running))
    statuses = await asyncio.gather(*(live.get(path) for path in ("/health", "/ready") for _ in range(100)))
    assert {status for status, _ in statuses} == {200}
    assert len(live.engine.made) == 1
    live.thread.resume()
    await stalled


async def test_a_fault_of_the_engine_is_a_5xx_or_a_last_event(serve):
    live = await serve(step_seconds=0.01)
    response = await live.open_stream(COMPLETIONS, n=2, **LONG)
    await response.content.readuntil(b"\n\n")
    live.thread.fault = "the device was lost"
    last = events_of("data: {}\n\n" + (await response.text()))[-1]
    assert last["error"] == {
        "message": "the device was lost",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    status, answer = await live.post(COMPLETIONS, {"prompt": "x"})
    assert (status, answer["error"]["message"]) == (500, "the device was lost")
    live.thread.fault = None
    await live.complete()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer right", 200),
        ("bearer right", 200),
        ("Bearer wrong", 401),
        ("Bearer righ", 401),
        ("Bearer RIGHT", 401),
        ("Bearer ", 401),
        ("right", 401),
        ("Basic right", 401),
        ("Bearer ключ", 401),
    ],
)
async def test_key_spellings(serve, header, status):
    live = await serve(say("x"), api_key="right")
    got, answer = await live.get("/v1/models", headers={"Authorization": header})
    assert got == status, answer


async def test_metrics_parse_and_hold_no_prompt(serve):
    live = await serve(say("marzipan"))
    await live.chat(messages=[{"role": "user", "content": "sesame"}], user="alice", cache_salt="tenant")
    await live.post("/v1/sesame", {})
    async with live.session.get(live.url + "/metrics") as response:
        text = await response.text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert not any(word in text for word in ("sesame", "alice", "tenant", "marzipan"))
    assert all(name.startswith("tierax_") for name in families)
    for name in ("time_to_first_token", "e2e_request_latency", "queue_time", "time_per_output_token"):
        count = [s for s in families[f"tierax_{name}_seconds"].samples if s.name.endswith("_count")]
        assert count[0].value == 1, name
    assert {s.labels["state"] for s in families["tierax_pages"].samples} == {
        "free",
        "evictable",
        "in_use",
        "total",
    }


async def test_wide_finite_buckets_and_sliding_hit_rate():
    engine, now = FakeEngine(), [0.0]
    thread = FakeEngineThread(engine)
    metrics = ServingMetrics(thread, thread.cache_control(0.5), lambda: now[0])
    for seconds in (0.004, 0.2, 95, 1500):
        assert min(bucket for bucket in BUCKETS if bucket >= seconds) < float("inf")
        metrics.ttft.observe(seconds)
    for second in range(200):
        now[0] = float(second)
        engine.stats.prompt_tokens += 10
        engine.stats.cached_tokens += 10 if second >= 100 else 0
        metrics.sample()
        if 0 < second < 100:
            assert metrics.hit_rate() == 0
    assert metrics.hit_rate() == 1
    now[0] = 400.0
    metrics.sample()
    now[0] = 470.0
    metrics.sample()
    assert metrics.hit_rate() != metrics.hit_rate(), "no prompts in the last minute: not a number"


async def test_draining_finishes_what_runs(serve):
    live = await serve(say("a long answer"), step_seconds=0.02)
    running = asyncio.create_task(live.chat())
    await eventually(lambda: live.engine.stats.running == 1)
    drain = asyncio.create_task(live.app[SERVICE].drain(5))
    await asyncio.sleep(0.01)
    assert (await live.get("/ready"))[0] == 503
    assert (await live.get("/health"))[0] == 200
    status, answer = await live.post(CHAT, {"messages": MESSAGES})
    assert (status, answer["error"]["code"]) == (503, "shutting_down")
    assert (await running)["choices"][0]["message"]["content"] == "a long answer"
    await drain


async def test_draining_has_a_limit(serve):
    live = await serve(step_seconds=0.02)
    response = await live.open_stream(CHAT, **LONG)
    await live.app[SERVICE].drain(0.1)
    last = events_of(await asyncio.wait_for(response.text(), 1))[-1]
    assert last["error"] == unavailable("The server is shutting down.", "shutting_down").payload()["error"]
    await eventually(lambda: live.engine.stats.finished == {"abort": 1})


@pytest.mark.parametrize(("limit", "finished"), [(5.0, True), (0.2, False)])
async def test_sigterm(limit, finished):
    engine = FakeEngine(say("0123456789" * 4))
    thread = FakeEngineThread(engine, step_seconds=0.02)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    lines: list[str] = []
    config = ServerConfig(port=port, shutdown_timeout=limit)
    server = asyncio.create_task(serve(thread, config, listener, lines.append))
    await eventually(lambda: any("curl" in line for line in lines))
    async with ClientSession() as session:
        body = {"messages": MESSAGES, "stream": True}
        response = await session.post(f"http://127.0.0.1:{port}{CHAT}", json=body)
        await response.content.readuntil(b"\n\n")
        os.kill(os.getpid(), signal.SIGTERM)
        events = events_of("data: {}\n\n" + await response.text())
    assert ("error" not in events[-1]) == finished
    assert await asyncio.wait_for(server, 3) == 0
    assert not thread.alive


async def test_warm_up_is_told_and_can_be_interrupted():
    thread = FakeEngineThread(FakeEngine())
    thread.is_ready = False
    thread.engine.stats.warm_programs, thread.engine.stats.step_programs = 7, 9
    lines: list[str] = []
    server = asyncio.create_task(serve(thread, ServerConfig(), bind("127.0.0.1", 0), lines.append))
    await eventually(lambda: lines == ["Warming up: 7 of 9 programs ready"])
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server, 3) == 0
    assert not any("curl" in line for line in lines)


async def test_a_second_signal_stops_at_once():
    thread = FakeEngineThread(FakeEngine(), step_seconds=0.02)
    listener = bind("127.0.0.1", 0)
    lines: list[str] = []
    server = asyncio.create_task(serve(thread, ServerConfig(shutdown_timeout=60), listener, lines.append))
    await eventually(lambda: any("curl" in line for line in lines))
    async with ClientSession() as session:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{CHAT}"
        async with session.post(url, json={"messages": MESSAGES, "stream": True} | LONG):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.2)
            assert not server.done()
            os.kill(os.getpid(), signal.SIGINT)
            assert await asyncio.wait_for(server, 3) == 0


async def test_the_server_ends_when_the_engine_does():
    thread = FakeEngineThread(FakeEngine())
    listener = bind("127.0.0.1", 0)
    lines: list[str] = []
    server = asyncio.create_task(serve(thread, ServerConfig(), listener, lines.append))
    await eventually(lambda: any("curl" in line for line in lines))
    thread.kill()
    assert await asyncio.wait_for(server, 3) == 1


async def test_port_in_use_is_one_line():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        code = (
            "from tierax.engine.config import EngineConfig; from tierax.serving.config import ServerConfig; "
            "from tierax.serving.server import run; import sys; "
            f"sys.exit(run(EngineConfig(model_path='demo'), ServerConfig(port={port})))"
        )
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


async def test_no_key_means_open(serve):
    live = await serve(say("x"))
    assert (await live.get("/v1/models"))[0] == 200
    assert (await live.get("/version"))[1]["version"]
