"""The online benchmark: what its clients send, and the figures that it makes of what they saw."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from helpers.fake_engine import FakeEngine
from helpers.live_server import Live
from tierax.bench.online import main, run
from tierax.bench.online_client import Server, Turn, summarize
from tierax.bench.peers import servers
from tierax.bench.runs import medians, spreads
from tierax.bench.talks import WORKLOADS, TalkError, Workload, make_talks, read_talks
from tierax.serving.config import ServerConfig

SMALL = Workload(3, 2, 3, 1, 40, 5, 4, 6)


@pytest_asyncio.fixture
async def live() -> AsyncIterator[Live]:
    started = await Live.start(FakeEngine(), ServerConfig(api_key="secret"))
    yield started
    await started.stop()


@pytest.mark.asyncio
async def test_conversations_grow_turn_by_turn(live: Live) -> None:
    seconds, turns = await run(Server(live.url, live.engine.model_name, "secret"), SMALL)
    assert sorted(turn.index for turn in turns) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(turn.output_tokens == 6 for turn in turns)
    assert all(0 < turn.first_token <= turn.whole <= seconds for turn in turns)
    by_index = [{t.prompt_tokens or 0 for t in turns if t.index == i} for i in range(3)]
    assert max(by_index[0]) < min(by_index[1]) < max(by_index[1]) < min(by_index[2])
    # The fake engine knows every prompt that it has seen, but no answer; the clients take its word.
    assert all(turn.cached_tokens is not None for turn in turns)


@pytest.mark.asyncio
async def test_a_seed_fixes_thinking_and_arrivals(live: Live) -> None:
    async def slept(workload: Workload) -> list[float]:
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)
            await asyncio.sleep(0)

        await run(Server(live.url, live.engine.model_name, "secret"), workload, sleep=sleep)
        return sorted(waits)

    slow = Workload(4, 4, 2, 0, 0, 3, 3, 2, think=0.5, arrivals=2.0)
    first, again = await slept(slow), await slept(slow)
    assert first == again
    assert len(first) == 4 + 4
    assert len(set(first)) == 8
    assert await slept(Workload(4, 4, 2, 0, 0, 3, 3, 2)) == [0.0] * 8


def test_figures() -> None:
    turns = [Turn(0, 0.2, 1.1, 100, 10, 0), Turn(0, 0.4, 1.3, 100, 10, 50), Turn(1, 0.1, 0.55, 200, 10, 150)]
    report = summarize(turns, 2.0)
    assert report["ttft_first_ms"] == pytest.approx({"mean": 300, "p50": 300, "p99": 400})
    assert report["ttft_later_ms"] == pytest.approx({"mean": 100, "p50": 100, "p99": 100})
    assert report["tpot_ms"]["p50"] == pytest.approx(100)
    assert (report["requests"], report["req_s"], report["output_tok_s"]) == (3, 1.5, 15)
    assert report["cached_share"] == 0.5
    assert report["cached_share_later"] == 0.75
    # One answer without a word on its cache, and nothing is said of any.
    assert summarize([*turns, Turn(1, 0.1, 0.2, 10, 2, None)], 2.0)["cached_share"] is None


@pytest.mark.asyncio
async def test_the_command(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--conversations 2 --turns 2 --system-words 10 --first-words 3 --user-words 3 --answer-tokens 4"
    command = ["--base-url", f"{live.url}/v1", "--workload", "pressure", *sizes.split()]

    async def bench(*more: str) -> int:
        return await asyncio.to_thread(main, [*command, *more])

    assert await bench("--api-key", "secret", "--json", str(tmp_path / "report.json")) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["model"] == live.engine.model_name
    assert report["workload"]["name"] == "pressure"
    assert report["requests"] == 4
    assert await bench("--api-key", "secret") == 0
    assert "TTFT of later turns" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        await bench("--api-key", "wrong")
    assert "HTTP 401" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="1"):
        await bench("--api-key", "secret", "--model", "other")
    assert "HTTP 404" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--turns", "-1"])


PEER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def begin(self):
        self.send_response(200)
        self.end_headers()
    def do_GET(self):
        self.begin()
        self.wfile.write(b'{"data": [{"id": "other"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.begin()
        for text in ("a", "b"):
            self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.asyncio
async def test_peers_beside_each_other(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: servers.Task) -> servers.Start:
        return servers.Start([sys.executable, "-c", "import sys; sys.exit('no such model')"])

    def working(task: servers.Task) -> servers.Start:
        return servers.Start([task.python, "-c", PEER, str(task.port)])

    monkeypatch.setattr("tierax.bench.peers.servers.model_file", lambda model: tmp_path / model)
    monkeypatch.setitem(servers.PEERS, "llama-server", working)
    monkeypatch.setitem(servers.PEERS, "transformers", broken)
    sizes = "--conversations 2 --turns 2 --system-words 10 --first-words 3 --user-words 3 --answer-tokens 4 --runs 2"
    command = ["--base-url", live.url, "--api-key", "secret", *sizes.split()]
    command += ["--vs", "llama-server", "--vs", "transformers", "--plot", str(tmp_path / "first.svg")]
    report_file = tmp_path / "report.json"
    assert await asyncio.to_thread(main, [*command, "--json", str(report_file)]) == 0
    report = json.loads(report_file.read_text())
    # Nothing is told by the peer: output tokens are its pieces, and of its cache nothing is said.
    assert report["missing"].keys() == {"transformers"}, report["missing"]
    peer = report["peers"]["llama-server"]
    assert (peer["requests"], peer["output_tokens"], peer["cached_share"], peer["runs"]) == (4, 8, None, 2)
    assert report["spread"]["req_s"][0] <= report["req_s"] <= report["spread"]["req_s"][1]
    assert "no such model" in report["missing"]["transformers"]
    assert {"processor", "cores", "load"} <= report["machine"].keys()
    assert len(report["ttft_ms"]["first"]) == 4
    assert "<svg" in (tmp_path / "first.svg").read_text()
    assert await asyncio.to_thread(main, command) == 0
    out = capsys.readouterr().out
    assert re.search(r"medians of 2 runs .* fake +llama-server\n", out)
    assert "not told" in out
    assert "transformers: its server ended with code 1: no such model" in out


def test_drawn_conversations_have_the_shape_of_chats() -> None:
    workload = replace(WORKLOADS["sharegpt-shaped"], conversations=200, arrivals=1.0)
    talks = make_talks(workload)
    again, other = make_talks(workload), make_talks(replace(workload, seed=2))
    assert [talk.said for talk in talks] == [talk.said for talk in again]
    assert talks[0].said != other[0].said
    assert 3 < sum(len(talk.said) for talk in talks) / 200 < 4.5
    assert len({talk.messages[0]["content"] for talk in talks}) == workload.systems
    lengths = [len(talk.said[0].split()) for talk in talks]
    assert 900 < sum(lengths) / 200 < 1600
    assert len(set(lengths)) > 150
    assert [talk.arrival for talk in talks] == sorted(talk.arrival for talk in talks)
    assert all(talk.thinks[0] == 0 and all(think > 0 for think in talk.thinks[1:]) for talk in talks)
    small = workload.scaled(0.01)
    assert (small.system_words, small.first_words, small.answer_tokens) == (15, 12, 4)


def test_conversations_of_a_file(tmp_path: Path) -> None:
    openai = {
        "messages": [{"role": "system", "content": "S"}, *({"role": "user", "content": c} for c in "ab")]
    }
    sharegpt = {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}
    lines, whole = tmp_path / "lines.jsonl", tmp_path / "whole.json"
    lines.write_text("\n".join(map(json.dumps, [openai, sharegpt])))
    whole.write_text(json.dumps([sharegpt, openai]))
    workload = Workload(0, 1, 0, 0, 0, 0, 0, 7)
    first, second = read_talks(lines, workload)
    assert (first.messages, first.said, first.answers) == (
        [{"role": "system", "content": "S"}],
        ["a", "b"],
        [7, 7],
    )
    assert (second.messages, second.said) == ([], ["x"])
    assert [talk.said for talk in read_talks(whole, replace(workload, conversations=1))] == [["x"]]
    for text, problem in (
        ("{", "not JSON"),
        ('{"a": 1}', "conversation 1: has neither"),
        ("[]", "no conversation"),
    ):
        lines.write_text(text)
        with pytest.raises(TalkError, match=problem):
            read_talks(lines, workload)


def test_runs_become_medians_and_spreads() -> None:
    runs = [
        {"a": 1, "b": {"c": 5.0}, "d": None},
        {"a": 9, "b": {"c": 1.0}, "d": None},
        {"a": 2, "b": {"c": 3.0}, "d": 4},
    ]
    assert medians(runs) == {"a": 2, "b": {"c": 3.0}, "d": None}
    assert spreads(runs) == {"a": [1, 9], "b": {"c": [1.0, 5.0]}}
