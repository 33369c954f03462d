"""The warm-up file, and the end: writes to the disk get their time, and no more than that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from helpers.byte_tokenizer import EOS
from helpers.fake_engine import FakeEngine, FakeEngineThread, say
from helpers.live_server import COMPLETIONS, eventually
from tierax.engine.config import ConfigError
from tierax.serving.config import ServerConfig
from tierax.serving.core.warming import read_warmup_file
from tierax.serving.server import bind, serve

pytestmark = pytest.mark.asyncio

PROMPTS = [
    {"prompt": "first"},
    {"messages": [{"role": "user", "content": "second"}]},
    {"token_ids": [65, 66]},
    {"prompt": "salted", "cache_salt": "s"},
]


class Running:
    """A server started as `tierax serve` does, within this process."""

    def __init__(self, thread: FakeEngineThread, *, warmup: Any = (), **config: Any) -> None:
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.thread = thread
        self.lines: list[str] = []
        self.task = asyncio.create_task(
            serve(thread, ServerConfig(**config), listener, self.lines.append, warmup=warmup)
        )

    def said(self, text: str) -> Callable[[], bool]:
        return lambda: any(text in line for line in self.lines)

    async def status(self, path: str = "/ready", body: Any = None) -> int:
        async with (
            ClientSession() as session,
            session.request("GET" if body is None else "POST", self.url + path, json=body) as answer,
        ):
            return answer.status

    async def stop(self) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(self.task, 5)


def write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


async def test_prompts_are_computed_before_the_server_is_ready(tmp_path):
    path = write(tmp_path / "prompts.jsonl", *PROMPTS)
    engine = FakeEngine(say("x"))
    thread = FakeEngineThread(engine)
    thread.hold()
    running = Running(thread, warmup=read_warmup_file(path))
    await eventually(lambda: len(engine.made) == 4)
    assert await running.status() == 503
    assert await running.status("/health") == 200
    assert await running.status(COMPLETIONS, {"prompt": "x"}) == 503
    thread.resume()
    await eventually(running.said("curl"))
    assert await running.status() == 200
    assert all(request.params.max_tokens == 1 for request in engine.made)
    assert [bytes(request.tokens[:6].tolist()) for request in engine.made if request.namespace] == [b"salted"]
    assert any("4 prompts" in line and "0 lines failed" in line for line in running.lines)
    assert await running.stop() == 0


async def test_bad_lines_are_told_of_and_do_not_stop_the_start(tmp_path):
    path = write(
        tmp_path / "prompts.jsonl",
        "{broken",
        "",
        {"prompt": "good"},
        {"prompt": "a", "token_ids": [1]},
        {"token_ids": [100_000]},
        {"prompt": "x" * 5000},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"prompt": "a", "cache_salt": ""},
    )
    engine = FakeEngine(say("x"))
    running = Running(FakeEngineThread(engine), warmup=read_warmup_file(path))
    await eventually(running.said("curl"))
    told = [line for line in running.lines if line.startswith("Warm-up file, line ")]
    assert sorted(line.split()[3] for line in told) == ["1:", "4:", "5:", "6:", "7:", "8:"]
    assert "exclude each other" in next(line for line in told if "line 4" in line)
    assert len(engine.made) == 1
    assert any("6 lines failed" in line for line in running.lines)
    assert await running.stop() == 0


async def test_a_signal_ends_the_warming(tmp_path):
    path = write(tmp_path / "prompts.jsonl", *PROMPTS * 20)
    engine = FakeEngine(lambda request, index: [65, 66, EOS])
    thread = FakeEngineThread(engine, step_seconds=0.2)
    running = Running(thread, warmup=read_warmup_file(path))
    await eventually(lambda: len(engine.made) > 1)
    assert await running.stop() == 0
    assert not running.said("curl")()
    assert len(engine.made) < 80


async def test_an_engine_that_dies_while_warming(tmp_path):
    path = write(tmp_path / "prompts.jsonl", *PROMPTS * 3)
    thread = FakeEngineThread(FakeEngine(), step_seconds=0.1, max_running=1)
    running = Running(thread, warmup=read_warmup_file(path))
    await eventually(lambda: thread.engine.stats.running > 0)
    await asyncio.to_thread(thread.kill)
    assert await asyncio.wait_for(running.task, 5) == 1
    assert not running.said("curl")()


async def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"warmup_file: .*No such file"):
        read_warmup_file(str(tmp_path / "none"))
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_warmup_file(str(tmp_path / "latin"))


@pytest.mark.parametrize("signals", [1, 2])
async def test_writes_get_their_time_unless_a_second_signal_comes(signals):
    thread = FakeEngineThread(FakeEngine(say("x")), step_seconds=0.02)
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()
    close = thread.close

    def slow_close(drain_timeout: float = 10.0) -> None:
        # As the real one with a slow disk: until the time is over, or it is hurried.
        loop.call_soon_threadsafe(closed.set)
        deadline = loop.time() + min(drain_timeout, 2.0)
        while loop.time() < deadline and not thread.hurried:
            time.sleep(0.01)
        close(drain_timeout)

    thread.close = slow_close
    running = Running(thread, disk_drain_timeout=0.3 if signals == 1 else 50)
    await eventually(running.said("curl"))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(closed.wait(), 3)
    if signals == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running.task, 1.5) == 0
    assert thread.hurried == (signals == 2)
    assert thread.drain_timeout == (0.3 if signals == 1 else 50)
