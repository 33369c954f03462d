"""The HTTP examples against a real server over the scripted engine."""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path

import pytest

from helpers.fake_engine import FakeEngine, say
from helpers.live_server import Live
from tierax import set_default_backend
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


@pytest.mark.asyncio
async def test_legal_qa(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    form = '{"answer": "yes", "confidence": 7}'
    live = await Live.start(FakeEngine(say(form), context_length=20_000), ServerConfig())
    monkeypatch.setattr(sys, "argv", ["legal_qa.py", live.url])
    try:
        example = await asyncio.to_thread(runpy.run_path, str(EXAMPLES / "legal_qa.py"))
        await asyncio.to_thread(example["main"])
        await asyncio.to_thread(example["backend"].close)
    finally:
        set_default_backend(None)
        await live.stop()
    out = capsys.readouterr().out
    assert out.count(form) == len(example["QUESTIONS"])
    assert "ended by stop" in out
    assert len(example["CONTRACT"]) > 6000


@pytest.mark.asyncio
async def test_branches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    live = await Live.start(FakeEngine(say("On Thursday.")), ServerConfig())
    monkeypatch.setattr(sys, "argv", ["branches.py", live.url])
    try:
        example = runpy.run_path(str(EXAMPLES / "branches.py"))
        await asyncio.to_thread(example["main"])
    finally:
        await live.stop()
    out = capsys.readouterr().out
    assert out.count("On Thursday.") == len(example["QUESTIONS"])
    assert "prompt tokens were computed" in out


def test_own_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trace = EXAMPLES.parent / "tests" / "lab" / "traces" / "mooncake_conversation_1000.jsonl.zst"
    monkeypatch.setattr(sys, "argv", ["own_policy.py", str(trace), "1000"])
    runpy.run_path(str(EXAMPLES / "own_policy.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["lru", "hazard", "Returning", "optimum"]
    assert "100.0% of the way" in lines[-1]
