"""The HTTP example against a real server over the scripted engine."""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path

import pytest

from helpers.fake_engine import FakeEngine, say
from helpers.live_server import Live
from tierax.serving.config import ServerConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.asyncio
async def test_chat_stream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    live = await Live.start(FakeEngine(say("It warns ships.")), ServerConfig())
    try:
        example = runpy.run_path(str(EXAMPLES / "chat_stream.py"))
        monkeypatch.setattr(sys, "argv", ["chat_stream.py", live.url])
        await asyncio.to_thread(example["main"])
    finally:
        await live.stop()
    out = capsys.readouterr().out
    assert out.count("It warns ships.") == len(example["TURNS"])
    assert out.count("prompt tokens from the cache]") == len(example["TURNS"])
