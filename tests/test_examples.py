"""The examples: those over HTTP against a real server over the scripted engine, the others with a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.fake_engine import FakeEngine, say
from helpers.live_server import Live
from helpers.tiered_engine import TieredEngine
from helpers.tiny_text_model import write_tiny_text_model
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


@pytest.mark.asyncio
async def test_agent_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    live = await Live.start(FakeEngine(say("Water it."), context_length=8000), ServerConfig())
    monkeypatch.setattr(sys, "argv", ["agent_loop.py", live.url])
    try:
        example = runpy.run_path(str(EXAMPLES / "agent_loop.py"))
        await asyncio.to_thread(example["main"])
    finally:
        await live.stop()
    out = capsys.readouterr().out
    assert out.count("\n> ") == len(example["TOOLS"])
    assert out.count("prompt tokens from the cache]") == len(example["TOOLS"]) + 1
    assert "Water it.\n" in out


@pytest.mark.asyncio
async def test_files_of_requests(tmp_path: Path) -> None:
    """`tierax batch` answers the batch; the warm-up file is one that a server takes."""
    from tierax.cli.main import main
    from tierax.serving.core.warming import read_warmup_file

    assert len(read_warmup_file(str(EXAMPLES / "warmup.jsonl"))) == 2
    live = await Live.start(FakeEngine(say("Paris.")), ServerConfig())
    out = tmp_path / "answers.jsonl"
    try:
        line = ["batch", str(EXAMPLES / "batch.jsonl"), str(out), "--base-url", f"{live.url}/v1"]
        assert await asyncio.to_thread(main, line) == 0
    finally:
        await live.stop()
    lines = out.read_text().splitlines()
    answers = {answer["custom_id"]: answer["response"] for answer in map(json.loads, lines)}
    assert {name: answer["status_code"] for name, answer in answers.items()} == dict.fromkeys(
        ("capital", "form", "text"), 200
    )
    assert answers["form"]["body"]["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("offline_batch", r"prompt tokens were cached\n.*\(a bad prompt\)\n    error: "),
        (
            "rag_shared_prefix",
            r"document first: .*?\n    0 of .*?\n    (\d{4}) of .*question first: .*?\n    0 of ",
        ),
        ("restart", r"the first server:.*'disk': 0\}.*the second server:.*'disk': \d{3,}\}\nthe same answer"),
    ],
)
def test_with_a_model_of_their_own(name: str, expected: str, tmp_path: Path) -> None:
    write_tiny_text_model(tmp_path / "model")
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent / "src"), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", tmp_path / "model"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout, re.DOTALL), done.stdout


@pytest.mark.asyncio
async def test_kv_events(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    events, missed = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/missed"
    config = ServerConfig(kv_events=json.dumps({"endpoint": events, "replay_endpoint": missed}))
    live = await Live.start(TieredEngine(), config)
    try:
        example = await asyncio.create_subprocess_exec(
            sys.executable, EXAMPLES / "kv_events.py", events, missed, stdout=asyncio.subprocess.PIPE
        )
        assert example.stdout is not None
        assert await asyncio.wait_for(example.stdout.readline(), 60) == b"GPU 0, CPU 0, STORAGE 0\n"
        await live.complete("A prompt of five pages.", max_tokens=1)
        async with asyncio.timeout(30):
            while await example.stdout.readline() != b"GPU 5, CPU 5, STORAGE 5\n":
                pass
        example.send_signal(signal.SIGINT)
        assert await example.wait() == 0
    finally:
        await live.stop()


def test_each_is_listed_and_tested() -> None:
    readme, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".jsonl"):
            assert f"({path.name})" in readme
            assert path.stem in tests
