"""`tierax chat` with a local model, with servers, and in a terminal with Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from helpers.chat_session import converse
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import Live
from helpers.tiny_text_model import write_tiny_text_model
from tierax.cli.chat_backends import ChatError, LocalModel, Message, RemoteModel, Turn
from tierax.cli.main import main
from tierax.engine.config import EngineConfig
from tierax.serving.config import ServerConfig

SRC = Path(__file__).resolve().parents[1] / "src"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_text_model(directory)
    return directory


LENGTH = 40
"""Tokens of every answer of the local model."""
TINY: dict[str, Any] = {
    "page_size": 4,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 64,
    "context_length": 256,
    "device_cache_size": "8MiB",
    "skip_warmup": True,
}


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[LocalModel]:
    said: list[str] = []
    backend = LocalModel(
        EngineConfig(model_path=str(model), **TINY),
        {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True},
        said.append,
    )
    assert said[0] == f"loading {model}"
    yield backend
    backend.close()


def test_a_local_model_remembers_its_prefix(local: LocalModel) -> None:
    texts: list[str] = []
    messages: list[Message] = [{"role": "user", "content": "Tell me something"}]
    turns = []
    for _ in range(2):
        turn = Turn(time.perf_counter, lambda piece, reasoning: texts.append(piece))
        local.answer(messages, turn)
        turns.append(turn)
        messages += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": "More"}]
    first, second = turns
    assert first.finish_reason == second.finish_reason == "length"
    assert first.output_tokens == second.output_tokens == LENGTH
    assert first.cached_tokens == 0
    assert second.cached_tokens is not None
    assert first.prompt_tokens is not None
    assert second.cached_tokens >= first.prompt_tokens - 8
    assert second.by_tier == {"device": second.cached_tokens, "host": 0, "disk": 0}
    assert first.ttft is not None
    assert first.ttft > 0
    assert "".join(texts) == first.text + second.text


def test_a_conversation_that_does_not_fit_is_said(local: LocalModel) -> None:
    code, out, err = converse(local, "long " * 100, "Hi")
    assert code == 1
    assert out.count("\n") >= 1
    assert "[error: " in err
    assert "context" in err
    assert "to the first token" in err.splitlines()[-1]


def test_an_interrupted_local_answer_is_aborted(local: LocalModel) -> None:
    def stop(piece: str, reasoning: bool) -> None:
        raise KeyboardInterrupt

    turn = Turn(time.perf_counter, stop)
    with pytest.raises(KeyboardInterrupt):
        local.answer([{"role": "user", "content": "Hi"}], turn)
    assert local._engine.loop.request_ids == []
    assert turn.output_tokens is not None
    assert turn.output_tokens < LENGTH
    again = Turn(time.perf_counter, lambda piece, reasoning: None)
    local.answer([{"role": "user", "content": "Hi"}], again)
    assert again.finish_reason == "length"


def test_a_model_without_a_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_text_model(tmp_path, chat_template=False)
    args = ("--page-size 4 --device-cache-size 8MiB --compile-cache-dir none --skip-warmup").split()
    assert main(["chat", str(tmp_path), *args]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("tierax chat: error: this model has no chat template")


@pytest_asyncio.fixture
async def live() -> AsyncIterator[Live]:
    found = await Live.start(FakeEngine(say("Hello there")), ServerConfig(api_key="secret"))
    yield found
    await found.stop()


@pytest.mark.asyncio
async def test_a_server_answers_and_tells_of_its_cache(live: Live) -> None:
    def talk() -> tuple[int, str, str]:
        return converse(RemoteModel(live.url, "secret", None, {"max_tokens": 20}), "Hi", "/reset", "Hi")

    code, out, err = await asyncio.to_thread(talk)
    assert (code, out) == (0, "Hello there\nHello there\n")
    first, _, second = err.splitlines()
    assert "12 tokens; 0 of " in first
    assert " prompt tokens cached (device " in second
    assert live.engine.made[0].params.max_tokens == 20


@pytest.mark.asyncio
async def test_bytes_that_are_no_text_do_no_harm(live: Live) -> None:
    env = os.environ | {"PYTHONPATH": str(SRC), "TIERAX_API_KEY": "secret", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "tierax", "chat", "--url", live.url]
    live.engine.script = say("na\u00efve")
    done = await asyncio.to_thread(
        subprocess.run, command, input=b"\xff\xfe caf\xc3\xa9\n", env=env, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, b"na?ve\n"), done.stderr


@pytest.mark.asyncio
async def test_what_a_server_refuses_is_said(live: Live) -> None:
    def ask(key: str | None, model: str | None, url: str = live.url) -> str:
        try:
            return converse(RemoteModel(url, key, model, {}), "Hi")[2]
        except ChatError as error:
            return str(error)

    assert await asyncio.to_thread(ask, "wrong", None) == "The API key is wrong."
    assert "There is no model 'other' here" in await asyncio.to_thread(ask, "secret", "other")
    nobody = await asyncio.to_thread(ask, None, None, "http://127.0.0.1:1")
    assert nobody == "http://127.0.0.1:1/v1: Connection refused"
    lost = await asyncio.to_thread(ask, "secret", "fake", f"{live.url}/no/such")
    assert lost == "[error: There is nothing at /no/such/chat/completions.]\n"


@pytest.mark.asyncio
async def test_any_other_server_will_do() -> None:
    """Without usage, with reasoning, with comments between events, and with an end in mid-stream."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"reasoning": "hm"}, {"content": "Yes"}]
        for delta in deltas:
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            await response.write(b": still here\n\ndata: " + json.dumps(chunk).encode() + b"\n\n")
        if len(bodies) == 1:
            await response.write(
                b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
            )
        elif len(bodies) == 2:
            await response.write(b'data: {"error": {"message": "out of luck"}}\n\n')
        return response

    app = web.Application()
    app.router.add_post("/api/v3/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    backend = RemoteModel(f"http://{host}:{port}/api/v3/", None, "some", {"temperature": 0.5})
    code, out, err = await asyncio.to_thread(converse, backend, "Hi", "Hi", "Hi")
    await runner.cleanup()
    assert (code, out) == (1, "hmYes\nhmYes\nhmYes\n")
    assert "cached" not in err.splitlines()[0]
    assert "[error: out of luck]" in err
    assert "[error: the answer broke off]" in err
    assert bodies[0]["temperature"] == 0.5
    # Reasoning is shown, but is no part of the conversation.
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--url", "localhost:1"], "--url localhost:1: give a URL such as http://localhost:30000"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1: Connection refused"),
        (["--url", "http://x", "--page-size", "4"], "--page-size is for a local model"),
        (["--api-key", "k"], "--api-key is for --url"),
        (["--model-path", "./none"], "none: no such file or directory"),
        (["--temperatur", "1"], "unrecognized arguments: --temperatur"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert main(["chat", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("tierax chat: error: ")
    assert message in line


@pytest.mark.slow
@pytest.mark.asyncio
async def test_in_a_terminal_ctrl_c_stops_the_answer_only(tmp_path: Path) -> None:
    live = await Live.start(FakeEngine(babble), ServerConfig(), step_seconds=0.02)
    env = os.environ | {"PYTHONPATH": str(SRC), "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    command = [sys.executable, "-m", "tierax", "chat", "--url", live.url]
    try:
        shown, code = await asyncio.to_thread(_in_terminal, command, env)
    finally:
        await live.stop()
    assert code == 0, shown
    assert "fake: /help lists commands, Ctrl-C stops an answer." in shown
    assert "[stopped]" in shown
    assert "Traceback" not in shown
    assert live.engine.stats.finished == {"abort": 1}
    history = tmp_path / "tierax" / "chat-history"
    assert "Hello you" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def _in_terminal(command: list[str], env: dict[str, str]) -> tuple[str, int]:
    """Says something, interrupts the answer, and leaves by Ctrl-D. What was shown, and the exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    )
    os.close(theirs)
    shown = ""

    def until(text: str, *, after: str = "") -> None:
        nonlocal shown
        deadline = time.monotonic() + 20
        while text not in shown.partition(after)[2] if after else text not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536).decode(errors="replace")

    try:
        until("> ")
        os.write(ours, b"Hello you\r")
        until("Hello you\r\n")
        mark = len(shown)
        while len(shown) < mark + 12:
            shown += os.read(ours, 65536).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        until("[stopped]")
        # A Ctrl-D that comes before the line editor has the terminal is lost.
        until("> ", after="to the first token")
        os.write(ours, b"\x04")
        code = process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown, code
