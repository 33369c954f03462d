"""`tierax bench cache` on a tiny model from end to end, and with `--quick` on the demo model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from helpers.fake_executor import ManualClock
from helpers.fake_mover import FakeStore
from helpers.tiered_rig import TieredRig
from helpers.tiny_text_model import write_tiny_text_model
from tierax.bench import cache
from tierax.bench.agents import Workload
from tierax.bench.cache_engine import Driver, EngineMaker, PageSize
from tierax.bench.cache_overhead import Burst
from tierax.cli.main import main
from tierax.engine.request import Request, SamplingParams

TINY = cache.Shapes(
    Workload(
        conversations=6,
        running=2,
        systems=3,
        system_tokens=96,
        first_tokens=32,
        user_tokens=8,
        answer_tokens=8,
        device_tokens=384,
        uncached=(2, 6),
    ),
    first_token=200,
    repeats=1,
    burst=Burst(2, 40, 4),
    jitter_prompts=2,
    jitter_tokens=64,
)
COPIES = [
    {"path": "host->device", "gb_s": 3.0, "memcpy_gb_s": 6.0, "ratio": 0.5},
    {"path": "disk->host cold", "gb_s": 0.3, "pread_gb_s": 0.5, "ratio": 0.6},
]


@pytest.fixture(scope="module", params=["fake", pytest.param("tiny", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all parts but the copies, which have a benchmark of their own: over a fake device in simulated time,
    and with a tiny model.
    """
    directory = tmp_path_factory.mktemp("bench")
    model, disk = directory / "model", directory / "disk"
    disk.mkdir()
    if request.param == "fake":
        maker = FakeMaker("fake", ManualClock(), progress=False)
    else:
        write_tiny_text_model(model)
        saving_time = {"max_num_batched_tokens": 4, "skip_warmup": True}
        options = TINY.limits | saving_time | {"compile_cache_dir": str(directory / "compiled")}
        maker = EngineMaker(str(model), perf_counter, options, progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "measure_copies", lambda *_, **__: COPIES)
        report = cache.measure(maker, TINY, cache.PARTS, disk)
    assert list(disk.iterdir()) == [], "disk caches are removed"
    return json.loads(json.dumps(report))


class FakeEngine:
    """What the driver needs of an engine, around the real loop and cache over a fake device."""

    def __init__(self, rig: TieredRig) -> None:
        self.loop, self.cache, self.clock = rig.loop, rig.cache, rig.clock
        self._rig = rig

    def make_requests(
        self, prompt: list[int], params: SamplingParams, *, request_id: str, on_delta: Any = None
    ) -> list[Request]:
        request = self._rig.request(prompt, params.max_tokens, id=request_id)
        request.on_delta = on_delta
        return [request]


@dataclass(frozen=True)
class FakeMaker(EngineMaker):
    stores: dict[str, FakeStore] = field(default_factory=dict)
    """By directory."""

    @contextmanager
    def open(self, **cache: Any) -> Iterator[Driver]:
        assert isinstance(self.clock, ManualClock)
        page, directory = self.page(), cache.get("host_disk_cache_dir")
        rig = TieredRig(
            pages=cache["device_cache_size"] // page.bytes - 1,
            page_size=page.tokens,
            host_pages=cache["host_cache_size"] // page.bytes,
            store=self.stores.setdefault(directory, FakeStore()) if directory else None,
            disk=directory is not None,
            enabled=not cache.get("disable_radix_cache", False),
            write_policy=cache.get("write_policy", "write_through"),
            prefetch=cache.get("prefetch_policy", "timeout=300ms"),
            clock=self.clock,
        )
        rng = random.Random(1)
        rig.mover.delay = lambda kind: rng.uniform(0.001, 0.05) if kind == "read" else 0.0
        yield Driver(FakeEngine(rig), self.clock.advance)  # pyright: ignore[reportArgumentType]
        rig.cache.check()

    def page(self) -> PageSize:
        return PageSize(4, 1000, 200)


def test_json_has_the_promised_names(run: dict[str, Any]) -> None:
    assert set(run["ttft_ms"]) >= {"cold", "disk", "host", "device"}
    assert all(value > 0 for value in run["ttft_ms"].values())
    assert run["copies"] == COPIES
    rows = run["configs"]
    assert [row["name"] for row in rows] == ["none", "DEVICE", "HOST", "DISK", "DEVICE-ALL"]
    promised = {
        "ttft_ms_mean",
        "ttft_ms_p99",
        "tpot_ms",
        "req_s",
        "device_kv_bytes",
        "hit_rate",
        "usd_per_mtok",
    }
    for row in rows:
        assert set(row) > promised
        assert row["requests"] == 22 or (row["name"], row["requests"]) == ("none", 14)
        assert row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        assert row["usd_per_mtok"] > 0
    assert all({"name", "value", "sense", "limit", "reached"} <= set(target) for target in run["targets"])


def test_each_row_hits_where_its_cache_is(run: dict[str, Any]) -> None:
    none, device, host, disk, everything = run["configs"]
    infinite = run["infinite_hit_rate"]
    assert none["hit_rate"] == 0
    assert 0 < device["hit_rate"] == device["hit_rate_by_tier"]["device"] < infinite
    assert host["hit_rate_by_tier"]["host"] > 0
    assert host["hit_rate_by_tier"]["disk"] == 0
    assert disk["hit_rate_by_tier"]["disk"] > 0
    assert everything["hit_rate"] == pytest.approx(infinite), "in whatever order, all that was there is found"
    assert disk["host_kv_bytes"] == host["host_kv_bytes"] > 0
    assert run["model"] == "fake" or disk["disk_bytes"] > disk["host_kv_bytes"]
    assert run["answers"]["different"] == []


def test_a_prompt_sent_again_computes_a_page_at_most(run: dict[str, Any]) -> None:
    again = run["ttft"]["recomputed_tokens"]
    assert again["cold"] == 200
    rest = 200 - 199 // run["page_tokens"] * run["page_tokens"]
    assert {again[place] for place in ("device", "host", "disk", "disk_warm")} == {rest}


def test_the_other_parts_are_there(run: dict[str, Any]) -> None:
    overhead = run["no_repeats"]
    assert overhead["tok_s_on"] > 0
    assert overhead["loss"] == pytest.approx(1 - overhead["tok_s_on"] / overhead["tok_s_off"])
    rows = {row["policy"]: row for row in run["prefetch"]}
    assert set(rows) == {"best_effort", "wait_complete", "timeout=300ms"}
    assert rows["wait_complete"]["hit_rate"] == 63 // run["page_tokens"] * run["page_tokens"] / 64
    assert all(len(row["ttft_ms"]) == 2 for row in rows.values())


def test_the_tables_say_it_too(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measure(*arguments: Any) -> dict[str, Any]:
        for part in cache.PARTS:
            arguments[-1](part, run)
        return run

    monkeypatch.setattr(cache, "measure", measure)
    assert cache.main(["--plot", str(tmp_path / "parts.svg")]) == 0
    picture = (tmp_path / "parts.svg").read_text()
    for title in ("Copies of pages", "First token of", "Agents on five caches", "Random prompts", "jittery"):
        assert title in picture
    text = capsys.readouterr().out
    for row in ("DEVICE-ALL", "disk_warm", "host and disk too, tok/s", "timeout=300ms", "host->device"):
        assert any(line.startswith(row) for line in text.splitlines()), row
    assert f"An infinite cache hits {run['infinite_hit_rate']:.1%}" in text
    assert "$/M tokens = ($2.5/h" in text
    assert "disk->host cold: of the plain copy's speed" in text
    assert "meant for the whole workload" in text


def test_answers_that_differ_are_an_error(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    different = [{"config": "HOST", "conversation": 1, "turn": 0, "position": 3, "gap": 0.5}]
    answers = {"near_ties": [], "different": different}
    monkeypatch.setattr(cache, "measure", lambda *_: run | {"answers": answers})
    assert cache.main(["--only", "table"]) == 1
    assert "answers differ" in capsys.readouterr().err


def test_the_command_line(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cache, "measure", lambda *arguments: asked.append(arguments) or run)
    options = [
        "--model",
        "m",
        "--quick",
        "--page-size",
        "32",
        "--disk-dir",
        str(tmp_path),
        "--only",
        "ttft",
        "--only",
        "table",
    ]
    assert main(["bench", "cache", *options, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("machine")["cores"] > 0
    assert report == run
    maker, shapes, parts, disk = asked[0]
    assert (maker.model, shapes, parts, disk) == ("m", cache.QUICK, ["ttft", "table"], tmp_path)
    assert maker.options == {"max_num_seqs": 2, "context_length": 1760, "page_size": 32}
    assert main(["bench", "cache", "--whole"]) == 0
    maker, shapes, parts, disk = asked[1][:4]
    assert (maker.model, shapes, parts, disk) == (
        "demo",
        cache.Shapes(Workload(uncached=None)),
        list(cache.PARTS),
        None,
    )
    assert maker.options == {"max_num_seqs": 6, "context_length": 4544}


def test_mistakes_are_told_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        cache.main(["--only", "tables"])
    assert "no-repeats" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cache.main(["--disk-dir", str(tmp_path / "none")])
    assert "none is no directory" in capsys.readouterr().err


@pytest.mark.slow
def test_quick_on_the_demo_model(tmp_path: Path) -> None:
    """Minutes long: ratios only; how much faster is for the machine to say."""
    target = tmp_path / "report.json"
    assert cache.main(["--quick", "--only", "ttft", "--only", "table", "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    none, device, host, disk, everything = report["configs"]
    assert device["hit_rate"] < host["hit_rate"] <= disk["hit_rate"] <= report["infinite_hit_rate"]
    assert disk["hit_rate"] >= report["infinite_hit_rate"] - 0.01
    assert disk["ttft_ms_mean"] < device["ttft_ms_mean"] < none["ttft_ms_mean"]
    assert disk["req_s"] > 1.5 * none["req_s"]
    assert disk["device_kv_bytes"] < 0.6 * everything["device_kv_bytes"]
    times = report["ttft_ms"]
    assert times["device"] < times["host"] < times["cold"]
    assert times["disk"] < times["cold"] / 2
