"""`tierax bench replay` on the fake device in simulated time, beside the lab's own run of the same trace."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.fake_executor import ManualClock
from helpers.tiered_rig import TieredRig
from tierax.bench import replay
from tierax.bench.cache_engine import Driver
from tierax.bench.replay import serve, summarize
from tierax.cli import lab_compare
from tierax.cli.main import main
from tierax.engine.request import Request, SamplingParams
from tierax.lab.arrivals import Pace
from tierax.lab.traces.own import write_file
from tierax.lab.traces.trace import Trace, TraceRequest


class FakeEngine:
    """As much of an engine as a driver needs, over a rig."""

    def __init__(self, rig: TieredRig) -> None:
        self.loop = rig.loop
        self.clock = rig.clock
        self.cache = rig.cache
        self.model_config = SimpleNamespace(vocab_size=1000)
        self._rig = rig

    def make_requests(self, prompt: list[int], params: SamplingParams, *, request_id: str) -> list[Request]:
        return [self._rig.request(prompt, params.max_tokens, id=request_id)]


def driver_of(clock: ManualClock) -> Driver:
    rig = TieredRig(pages=64, page_size=4, host_pages=0, disk=False, clock=clock, seqs=4, budget=64)
    return Driver(FakeEngine(rig), clock.advance)  # pyright: ignore[reportArgumentType]


def chat(sessions: int = 3, turns: int = 2) -> Trace:
    """Turns of whole pages of 4 tokens; a later one thinks for a second."""
    requests = [
        TraceRequest(
            arrival=10.0 * number + turn,
            blocks=array("i", [*range(100 * number, 100 * number + 4 + turn)]),
            prompt_tokens=4 * (4 + turn),
            output_tokens=3,
            session=f"s{number}",
            turn=turn,
            think=1.0 if turn else None,
        )
        for number in range(sessions)
        for turn in range(turns)
    ]
    return Trace("chat", requests, 4)


@pytest.mark.parametrize(
    ("pace", "least", "most"),
    [(Pace(), 21.0, 21.5), (Pace(rate=10.0), 2.0, 2.5), (Pace(users=1), 3.0, 3.5), (Pace(users=3), 1.0, 1.5)],
)
def test_requests_are_sent_at_their_times_and_hit_what_came_before(
    pace: Pace, least: float, most: float
) -> None:
    clock = ManualClock()
    report = summarize(serve(driver_of(clock), chat(), pace, clock, clock.advance))
    assert least < report["seconds"] < most
    assert report["requests"] == 6
    if pace.users is not None or pace.rate == 1.0:
        assert report["hit_rate"] == pytest.approx(3 * 16 / (3 * (16 + 20)))
    assert report["hit_rate_by_tier"]["device"] == report["hit_rate"]
    assert 0 < report["ttft_ms_p50"] <= report["ttft_ms_p99"]


def test_a_trace_that_is_absent_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        replay.main(["--trace", "/no/such"])
    assert stopped.value.code == 2
    assert "No such file" in capsys.readouterr().err


def test_compare_predicts_from_benchmarks_and_measures_in_other_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def bench(name: str, model: str, flags: list[str]) -> None:
        asked.append(name)
        out = Path(flags[flags.index("--json") + 1])
        decode = [
            {"batch": b, "context": c, "tok_s": b / (0.01 + 1e-6 * b * c)} for b in (1, 8) for c in (64, 512)
        ]
        prefill = [{"tokens": n, "tok_s": 1000.0} for n in (64, 512)]
        figures = {
            "hit_rate": 0.5,
            "ttft_ms_mean": 100.0,
            "ttft_ms_p99": 200.0,
            "tpot_ms": 10.0,
            "req_s": 2.0,
        }
        reports: dict[str, Any] = {
            "offline": {"decode": decode, "prefill": prefill, "limits": {"max_num_batched_tokens": 512}},
            "cache": {"copies": [{"path": p, "gb_s": 1.0} for p in ("device->host", "host->device", "disk->host warm")]},
            "replay": {**figures, "requests": 9, "hit_rate_by_tier": {}},
        }  # fmt: skip
        out.write_text(json.dumps(reports[name]))

    monkeypatch.setattr(lab_compare, "_bench", bench)
    assert main(["lab", "compare", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert asked == ["offline", "cache", *["replay"] * len(lab_compare.CASES)]
    assert [row["name"] for row in rows] == [case.name for case in lab_compare.CASES]
    for row in rows:
        assert row["measured"]["req_s"] == 2.0
        assert 0 < row["predicted"]["hit_rate"] < 1
        assert row["predicted"]["ttft_ms_mean"] > 10
    assert main(["lab", "compare"]) == 0
    assert "points" in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_engine_serves_a_trace(tmp_path: Path) -> None:
    write_file(chat(), tmp_path / "chat.jsonl")
    flags = ["--trace", str(tmp_path / "chat.jsonl"), "--users", "2", "--json", str(tmp_path / "out.json")]
    small = ["--page-size", "4", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--context-length", "128"]  # fmt: skip
    assert replay.main([*flags, *small, "--device-cache-size", "64MiB"]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["requests"] == 6
    assert report["hit_rate"] == pytest.approx(3 * 16 / (3 * (16 + 20)))
