"""`tierax batch`: every line gets its answer or its error once, however often the run is cut off."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tierax.engine.replicas
from helpers.batch_client import jsonl, line
from helpers.cli_calls import mistake
from helpers.fake_engine import FakeEngine, FakeEngineThread, Script, babble, say
from helpers.live_server import CHAT, Live
from tierax.cli.main import main
from tierax.serving.batch import offline
from tierax.serving.batch import results as result_files
from tierax.serving.batch.lines import MAX_CUSTOM_ID
from tierax.serving.config import ServerConfig

SRC = Path(__file__).resolve().parents[1] / "src"
LINES = 300
"""Of a batch that is cut off."""


class Local:
    """`tierax batch` with a scripted engine in place of the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.engines: list[FakeEngine] = []
        self.script: Script = say("Hello")
        self.source, self.output = directory / "in.jsonl", directory / "out.jsonl"
        monkeypatch.setattr(tierax.engine.replicas, "Engine", self._load)
        monkeypatch.setattr(tierax.engine.replicas, "EngineThread", FakeEngineThread)

    def _load(self, config: Any) -> FakeEngine:
        self.engines.append(FakeEngine(self.script))
        return self.engines[-1]

    def run(self, lines: Iterable[dict[str, Any] | str], *flags: str) -> int:
        self.source.write_bytes(jsonl(lines))
        return main(["batch", str(self.source), str(self.output), *flags])

    @property
    def answers(self) -> list[dict[str, Any]]:
        return read(self.output)


def read(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    assert not raw or raw.endswith(b"\n")
    return [json.loads(x) for x in raw.splitlines()]


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Local:
    return Local(monkeypatch, tmp_path)


def ids(count: int, **body: Any) -> list[dict[str, Any]]:
    return [line(f"q{i}", **body) for i in range(count)]


def test_answers_are_what_http_says(local: Local, capsys: pytest.CaptureFixture[str]) -> None:
    assert local.run([*ids(5), line("chat", CHAT)]) == 0
    assert {x["custom_id"] for x in local.answers} == {*(f"q{i}" for i in range(5)), "chat"}
    for answer in local.answers:
        assert answer.keys() == {"id", "custom_id", "response", "error"}
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
    chat = next(x for x in local.answers if x["custom_id"] == "chat")
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    out, err = capsys.readouterr()
    assert out == ""
    assert "6 lines answered (0 before), 0 failed" in err


def test_bad_lines_have_their_errors_and_stop_nothing(
    local: Local, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line("good"),
        line("model", model="other"),
        "{broken",
        line("nope", "/v1/nope"),
        {name: value for name, value in line("x").items() if name != "custom_id"},
        line("good"),
        line("stream", stream=True),
        line("long", prompt="x" * 9000),
        line("y" * (MAX_CUSTOM_ID + 1)),
        '{"custom_id": "lone", "url": "/v1/completions", "body": {"prompt": "\\ud83d"}}',
        line("last"),
    ]
    assert local.run(lines) == 1
    found = {x["custom_id"] if x["error"] is None else x["error"]["line"]: x for x in local.answers}
    assert len(local.answers) == len(found) == len(lines)
    status = {key: x["response"]["status_code"] for key, x in found.items() if x["error"] is None}
    assert status == {"good": 200, "last": 200, "model": 404, "nope": 404, "stream": 400, "long": 400}
    codes = {key: x["error"]["code"] for key, x in found.items() if x["error"] is not None}
    assert codes == {
        3: "invalid_json_line",
        5: "invalid_request_line",
        6: "duplicate_custom_id",
        9: "invalid_request_line",
        10: "invalid_json_line",
    }
    assert all(x["response"] is None for x in found.values() if x["error"] is not None)
    assert "11 lines answered (0 before), 9 failed" in capsys.readouterr().err


def test_a_second_run_does_only_what_is_left(local: Local, capsys: pytest.CaptureFixture[str]) -> None:
    assert local.run([*ids(3), "{broken"]) == 1
    before = local.output.read_bytes()
    assert local.run([*ids(3), "{broken", *ids(8)[3:]]) == 1
    assert local.output.read_bytes().startswith(before)
    assert len(local.answers) == 9
    assert len(local.engines[1].made) == 5
    assert "9 lines answered (4 before)" in capsys.readouterr().err
    assert local.run([*ids(3), "{broken", *ids(8)[3:]]) == 1
    assert len(local.engines) == 2, "the model was loaded for nothing"


def test_a_torn_last_line_is_done_again(local: Local) -> None:
    assert local.run(ids(6)) == 0
    whole = local.output.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for torn in (1, 20, len(last) - 1):
        local.output.write_bytes(whole[: len(whole) - len(last) + torn])
        assert local.run(ids(6)) == 0
        assert sorted(x["custom_id"] for x in local.answers) == [f"q{i}" for i in range(6)]
        assert len(local.engines[-1].made) == 1


def test_failed_lines_can_be_tried_again(local: Local) -> None:
    local.script = babble
    assert local.run([*ids(3), line("bad", max_tokens=0)]) == 1
    good = [x for x in local.answers if x["response"]["status_code"] == 200]
    assert local.run([*ids(3), line("bad", max_tokens=2)]) == 1
    assert local.run([*ids(3), line("bad", max_tokens=2)], "--retry-failed") == 0
    assert local.answers[:3] == good
    assert local.answers[3]["custom_id"] == "bad"
    assert [x.name for x in local.output.parent.iterdir() if x.name.startswith("out")] == ["out.jsonl"]


def test_stdin_and_stdout(
    local: Local, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(jsonl(ids(3)))))
    assert main(["batch", "-", "-"]) == 0
    out = capfdbinary.readouterr().out
    assert {json.loads(x)["custom_id"] for x in out.splitlines()} == {"q0", "q1", "q2"}


def test_no_more_at_once_than_allowed(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]

    class Watched(FakeEngineThread):
        def submit(self, requests: Any) -> None:
            super().submit(requests)
            most[0] = max(most[0], len(self.running) + len(self.waiting))

    monkeypatch.setattr(tierax.engine.replicas, "EngineThread", Watched)
    assert local.run(ids(20), "--max-concurrency", "3") == 0
    assert 1 <= most[0] <= 3


def test_mistakes_are_one_line(local: Local, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local.source.write_bytes(jsonl(ids(2)))
    source, output = str(local.source), str(local.output)
    link = tmp_path / "link.jsonl"
    link.symlink_to(local.source)
    assert "input and output at once" in mistake(capsys, "batch", source, source)
    assert "input and output at once" in mistake(capsys, "batch", source, str(link))
    assert local.source.read_bytes() == jsonl(ids(2))
    assert "No such file" in mistake(capsys, "batch", str(tmp_path / "nothing"), output)
    assert "not a plain file" in mistake(capsys, "batch", source, str(tmp_path))
    assert "No such file" in mistake(capsys, "batch", source, str(tmp_path / "no" / "out"))
    assert "at least 1" in mistake(capsys, "batch", source, output, "--max-concurrency", "0")
    assert "leave --model-path away" in mistake(
        capsys, "batch", source, output, "--base-url", "http://x", "--model", "m"
    )
    assert "give a URL" in mistake(capsys, "batch", source, output, "--base-url", "localhost:1")
    assert "--api-key is for --base-url" in mistake(capsys, "batch", source, output, "--api-key", "k")
    assert local.engines == []


@pytest.mark.parametrize("text", ["dear diary", "dear diary\n", '{"id":"x"}\n', "\0\0\0"])
def test_a_file_of_something_else_is_left_alone(
    local: Local, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    local.output.write_text(text)
    assert local.run(ids(2)) == 2
    assert "no output of a batch" in capsys.readouterr().err
    assert local.output.read_text() == text


def test_two_runs_do_not_write_one_file(local: Local, capsys: pytest.CaptureFixture[str]) -> None:
    holder = result_files.ResultFile(local.output, result_files.Tally())
    assert local.run(ids(2)) == 2
    assert "another process is writing results" in capsys.readouterr().err
    holder.close()
    assert local.run(ids(2)) == 0


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(
    local: Local, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.write, [3]

    def bounded(fd: int, raw: bytes) -> int:
        room[0] -= 1
        if room[0] < 0:
            write(fd, raw[:9])
            raise OSError(28, "No space left on device")
        return write(fd, raw)

    with monkeypatch.context() as patch:
        patch.setattr(result_files.os, "write", bounded)
        assert local.run(ids(9)) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert len(local.answers) == 3
    assert local.run(ids(9)) == 0
    assert sorted(x["custom_id"] for x in local.answers) == [f"q{i}" for i in range(9)]


def test_an_engine_that_ends_is_told(
    local: Local, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(FakeEngineThread):
        def submit(self, requests: Any) -> None:
            if len(self.engine.made) > 2:
                self.kill()
            super().submit(requests)

    monkeypatch.setattr(tierax.engine.replicas, "EngineThread", Mortal)
    assert local.run(ids(5), "--max-concurrency", "1") == 1
    assert "the engine has stopped" in capsys.readouterr().err
    assert len(local.answers) == 2


@pytest.mark.asyncio
async def test_a_server_answers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = await Live.start(FakeEngine(say("Hello")), ServerConfig(api_key="right"))
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(
        jsonl([*ids(5), line("bad", temperature=-1), line("nope", "/v1/nope"), line("x", "/metrics")])
    )

    def run(key: str, url: str = live.url) -> int:
        return main(["batch", str(source), str(output), "--base-url", f"{url}/v1/", "--api-key", key])

    try:
        assert await asyncio.to_thread(run, "wrong") == 2
        assert "wants another API key" in capsys.readouterr().err
        assert all(x["response"] is None for x in read(output))
        assert await asyncio.to_thread(run, "right") == 1
        status = {x["custom_id"]: x["response"] and x["response"]["status_code"] for x in read(output)}
        assert status == {f"q{i}": 200 for i in range(5)} | {"bad": 400, "nope": 404, "x": None}
        output.unlink()
        assert await asyncio.to_thread(run, "right", "http://127.0.0.1:1") == 2
        assert "127.0.0.1:1" in capsys.readouterr().err
    finally:
        await live.stop()


@pytest.mark.asyncio
async def test_a_busy_server_is_asked_again_and_a_lost_one_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "DELAYS", (0.1,) * 3)
    monkeypatch.setattr(offline, "MAX_DELAY", 0.1)
    live = await Live.start(FakeEngine(say("Hello")), ServerConfig())
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(ids(3)))
    args = ["batch", str(source), str(output), "--base-url", live.url, "--max-concurrency", "1"]
    live.thread.is_ready = False
    assert await asyncio.to_thread(main, args) == 1
    assert "has no room: The engine is still warming up." in capsys.readouterr().err
    assert output.read_bytes() == b""

    running = asyncio.create_task(asyncio.to_thread(main, args))
    await asyncio.sleep(0.1)
    live.thread.is_ready = True
    assert await running == 0
    output.unlink()

    asked: list[Any] = []

    def lose(request: Any, index: int) -> list[int]:
        asked.append(request)
        if len(asked) == 2:
            asyncio.run_coroutine_threadsafe(live.stop(), loop)
        return [*b"Hello", 257]

    loop = asyncio.get_running_loop()
    live.engine.script = lose
    live.thread.step_seconds = 0.05
    assert await asyncio.to_thread(main, args) == 1
    assert "the same command goes on from here" in capsys.readouterr().err
    assert len(read(output)) < 3


async def cut_off(live: Live, source: Path, output: Path, number: int, after: int) -> tuple[int, str]:
    """Exit code and stderr of a process that got a signal when `after` lines were answered."""
    command = [sys.executable, "-m", "tierax", "batch", str(source), str(output), "--base-url", live.url]
    env = os.environ | {"PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        while not output.exists() or output.read_bytes().count(b"\n") < after:
            assert process.poll() is None, process.communicate()
            await asyncio.sleep(0.005)
        # Nothing more is answered, however late the process hears of it.
        live.thread.hold()
        process.send_signal(number)
        try:
            _, err = await asyncio.to_thread(process.communicate, timeout=300)
        finally:
            live.thread.resume()
        return process.returncode, err


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
async def test_a_run_that_is_cut_off_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    live = await Live.start(FakeEngine(babble), ServerConfig(), step_seconds=0.002, max_running=4)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(ids(LINES, max_tokens=8)))
    try:
        code, err = await cut_off(live, source, output, number, after=20)
        answered = output.read_bytes().count(b"\n")
        assert 20 <= answered < LINES
        if number == signal.SIGINT:
            assert code == 130
            assert re.search("interrupted; the same command goes on from here", err)
            assert "Traceback" not in err
            assert len(read(output)) == answered
        whole = sum(raw.endswith(b"\n") for raw in output.read_bytes().splitlines(keepends=True))
        assert await asyncio.to_thread(main, ["batch", str(source), str(output), "--base-url", live.url]) == 0
        assert f"{LINES} lines answered ({whole} before)" in capsys.readouterr().err
        assert sorted(x["custom_id"] for x in read(output)) == sorted(f"q{i}" for i in range(LINES))
    finally:
        await live.stop()
