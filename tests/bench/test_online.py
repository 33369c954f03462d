"""The online benchmark: what its clients send, and the figures that it makes of what they saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from helpers.fake_engine import FakeEngine
from helpers.live_server import Live
from tierax.bench.online import Server, Turn, Workload, main, run, summarize
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
    by_index = [{t.prompt_tokens for t in turns if t.index == i} for i in range(3)]
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
