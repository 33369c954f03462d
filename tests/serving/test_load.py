"""Many clients at once, some of whom leave or send nonsense: every answer is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from helpers.byte_tokenizer import EOS
from helpers.fake_engine import FakeEngine
from helpers.live_server import Live
from helpers.serve_process import ServeProcess
from helpers.tiny_text_model import write_tiny_text_model
from tierax.bench.load import Report, bucket_percentile, drive, main, percentile
from tierax.bench.load_clients import Workload


def check(report: Report, workload: Workload) -> None:
    """Nothing went wrong, and all kinds of clients were there in about their shares."""
    assert report.problems == []
    assert report.finished >= workload.clients
    assert 0.5 < report.left / report.requests / workload.leave < 2
    assert 0.3 < report.refused / report.requests / workload.bad < 3
    assert report.pages_in_use == 0


@pytest.mark.asyncio
async def test_a_burst_of_clients(serve) -> None:
    # What it says follows from the conversation, so that a wrong answer shows.
    engine = FakeEngine(lambda request, index: [97 + token % 26 for token in request.tokens[-40:]] + [EOS])
    live: Live = await serve(engine=engine, step_seconds=0.002, max_running=32)
    workload = Workload(clients=128, seconds=3.0, max_tokens=24)
    report = await drive(live.url, workload)
    check(report, workload)
    assert len(engine.made) <= report.requests + workload.conversations
    assert engine.stats.finished["abort"] > 0


@pytest.mark.asyncio
async def test_a_wrong_answer_shows(serve) -> None:
    said = 0

    def forgetful(request: object, index: int) -> list[int]:
        nonlocal said
        said += 1
        return [*(b"the answer" if said % 3 else b"a surprise"), EOS]

    live: Live = await serve(forgetful, max_running=32)
    report = await drive(live.url, Workload(clients=4, seconds=0.5, conversations=4))
    assert any("answers differ from solo ones" in problem for problem in report.problems)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--host-cache-size", "4MiB", "--device-cache-size", "1MiB")])
def test_the_real_engine_under_load(tmp_path: Path, flags: tuple[str, ...]) -> None:
    write_tiny_text_model(tmp_path / "model")
    sizes = ("--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--context-length", "512")
    with ServeProcess(tmp_path / "model", *sizes, "--log-level", "warning", *flags) as server:
        workload = Workload(clients=256, seconds=60.0)
        report = asyncio.run(drive(server.url, workload))
        check(report, workload)
        _, early, late = report.rss_mib
        assert late < early + 30
        assert server.stop() == 0


def test_percentiles() -> None:
    assert percentile([], 0.99) == 0
    assert percentile([3, 1, 2, 4], 0.5) == 3
    assert percentile(list(range(100)), 0.99) == 99
    before, after = {0.1: 5.0, 0.5: 5.0, float("inf"): 5.0}, {0.1: 95.0, 0.5: 104.0, float("inf"): 105.0}
    assert bucket_percentile(before, after, 0.9) == 0.1
    assert bucket_percentile(before, after, 0.99) == 0.5
    assert bucket_percentile(before, after, 1.0) == float("inf")


@pytest.mark.parametrize("args", [["--clients", "0"], ["--leave", "0.9", "--bad", "0.2"], ["--bad", "-1"]])
def test_mistakes_in_the_call(args: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["http://127.0.0.1:9", "--seconds", "1"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("tierax bench load: http://127.0.0.1:9: ")
