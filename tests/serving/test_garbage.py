"""What a call leaves behind goes by itself: the collector's pauses, in which nothing else runs, are rare and short."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from helpers.fake_engine import FakeEngine, FakeEngineThread, say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live, eventually
from tierax.engine.request import Request
from tierax.serving.config import ServerConfig
from tierax.serving.core.generation import Call, Generation
from tierax.serving.core.keys import SERVICE
from tierax.serving.http.errors import ApiError
from tierax.serving.server import bind
from tierax.serving.server import serve as run_server


@pytest.fixture
def only_cycles() -> Iterator[None]:
    """All that is left over stays where `gc.collect` finds it."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.asyncio
@pytest.mark.usefixtures("only_cycles")
async def test_no_call_waits_for_the_collector(serve) -> None:
    live: Live = await serve(step_seconds=0.002)
    await live.chat(max_tokens=4, n=3)
    await live.stream(COMPLETIONS, max_tokens=4)
    # One who leaves in the midst of it, and one whose call is ended from outside.
    response = await live.open_stream(CHAT)
    await response.content.readline()
    response.close()
    cut = asyncio.create_task(live.post(CHAT, {"messages": MESSAGES}))
    service = live.app[SERVICE]
    await eventually(lambda: any(call.requests for call in service._open))
    service.abort(None, b"")
    await cut
    for body in (b"[", {"messages": []}, {"messages": MESSAGES, "model": "another"}):
        assert (await live.post(CHAT, body))[0] in (400, 404)
    await eventually(lambda: service.open_calls == 0 and not live.thread.running)
    made = len(live.engine.made)
    assert made == 6
    live.engine.made.clear()
    gc.collect()
    left = [type(found) for found in gc.garbage]
    assert not {Generation, Call, Request, ApiError} & set(left)


@pytest.mark.asyncio
async def test_what_stays_is_frozen_once_the_server_is_ready_and_until_it_ends() -> None:
    assert gc.get_freeze_count() == 0
    frozen: list[int] = []

    def told(line: str) -> None:
        if line.startswith("Ready: "):
            frozen.append(gc.get_freeze_count())
            thread.kill()

    thread = FakeEngineThread(FakeEngine(say("x")))
    with bind("127.0.0.1", 0) as listener:
        assert await run_server(thread, ServerConfig(data_dir="none"), listener, told) == 1
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0
