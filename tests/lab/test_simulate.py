"""Simulated runs: the real loop and cache on simulated time, held against arithmetic by hand and against replays."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tierax.engine.plan import Row, StepPlan
from tierax.engine.request import Request, SamplingParams
from tierax.lab.arrivals import Pace
from tierax.lab.cost import ModelWork, Roofline
from tierax.lab.errors import LabError
from tierax.lab.presets import DEVICES, MODELS, device_of, model_of
from tierax.lab.result import Result
from tierax.lab.setup import Setup
from tierax.lab.simulate import Simulation
from tierax.lab.traces.read import load_trace
from tierax.lab.traces.trace import Trace, TraceRequest

HERE = Path(__file__).parent / "traces"
PAGE = 16
SETUP = Setup(page_tokens=PAGE, max_num_batched_tokens=4096, device_bytes=600 * PAGE * 147_456)


def request_of(
    arrival: float, blocks: range | list[int], output: int = 4, prompt: int | None = None, **more: object
) -> TraceRequest:
    """A prompt of whole blocks of one page, unless `prompt` cuts it."""
    tokens = len(blocks) * PAGE if prompt is None else prompt
    return TraceRequest(arrival, array("i", blocks), tokens, output, **more)  # pyright: ignore[reportArgumentType]


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("test", list(requests), PAGE)


def checked(trace: Trace, setup: Setup = SETUP, pace: Pace | None = None) -> Result:
    """A run in which the cache, the scheduler and the tiers are in order now and then, and nothing is held in the end."""
    run = Simulation(trace, setup, pace or Pace())
    step, turns = run.loop.step, count()

    def checking() -> bool:
        busy = step()
        if next(turns) % 37 == 0:
            run.loop.scheduler.check()
        return busy

    run.loop.step = checking  # pyright: ignore[reportAttributeAccessIssue]
    result = run.run()
    run.cache.check()
    assert run.cache.in_use == run.cache.host.in_use == 0
    if run.index is not None:
        run.index.check()
    return result


def lone_prefill(setup: Setup, tokens: int, start: int = 0) -> float:
    """Seconds of host and device for a prompt's chunk."""
    request = Request("x", array("i", [1] * tokens), tokens, SamplingParams(), 0, frozenset(), tokens + 1)
    plan = StepPlan(1, (Row(request, start, tokens - start, sample=True),), ())
    return setup.cost.device_seconds(plan) + setup.cost.host_seconds(plan)


def test_a_lone_request_takes_what_the_roofline_says() -> None:
    result = checked(trace_of(request_of(5.0, range(100))))
    assert result.ttft[0] == pytest.approx(lone_prefill(SETUP, 1600))
    assert result.hit_rate == 0
    assert result.seconds == pytest.approx(result.ttft[0] + 3 * result.tpot[0])
    assert 0.008 < result.tpot[0] < 0.020, "16 GB of weights at 2 TB/s"


def test_the_roofline_is_arithmetic_on_what_the_model_computes_and_reads() -> None:
    model, device = MODELS["qwen3-8b"], DEVICES["a100-80g"]
    work = ModelWork.of(model, 2.0, 2)
    assert work.kv_bytes == 147_456
    assert work.weight_bytes == pytest.approx(15.1e9, rel=0.01)
    assert work.matrix_flops + work.head_flops == pytest.approx(15.1e9, rel=0.01)
    assert work.prefill_flops(0, 100) + work.prefill_flops(100, 300) == pytest.approx(
        work.prefill_flops(0, 300)
    )
    long = lone_prefill(SETUP, 4096) / lone_prefill(replace(SETUP, devices=4), 4096)
    assert 2.5 < long < 4.0, "four devices compute four times as fast, and exchange results"
    cost = Roofline(work, device)
    request = Request("x", array("i", [1] * 1000), 1000, SamplingParams(), 0, frozenset(), 2000)
    one, many = (StepPlan(1, (), (Row(request, 999, 1, sample=True),) * n) for n in (1, 64))
    assert cost.device_seconds(many) < 2 * cost.device_seconds(one), "weights are read once for all rows"


def test_the_second_request_finds_the_first_ones_whole_pages_on_the_device() -> None:
    result = checked(trace_of(request_of(0, range(100)), request_of(10, [*range(100), 200], prompt=1610)))
    assert result.hit_rate_by_tier == {"device": pytest.approx(1600 / 3210), "host": 0, "disk": 0}
    assert result.ttft[1] == pytest.approx(lone_prefill(SETUP, 1610, start=1600))
    assert result.compute_hit_rate < result.hit_rate < 0.5, "late tokens cost more"


def test_a_known_answer_is_part_of_the_prefix_of_the_next_turn() -> None:
    session = [request_of(0, range(12), prompt=160, output=32), request_of(9, range(14), prompt=210)]
    assert checked(trace_of(*session)).hit_rate == pytest.approx(176 / 370), (
        "the last token's KV is never computed"
    )
    session[0].blocks = array("i", range(10))
    assert checked(trace_of(*session)).hit_rate == pytest.approx(160 / 370), (
        "an unknown answer is nobody's prefix"
    )


def test_what_left_the_device_comes_back_from_the_host_or_the_disk_and_takes_its_time() -> None:
    page = SETUP.page_bytes
    small = replace(SETUP, device_bytes=120 * page, prefetch_policy="wait_complete")
    visits = [request_of(0, range(100)), request_of(10, range(100, 200)), request_of(20, range(100))]
    cold = checked(trace_of(*visits), small)
    host = checked(trace_of(*visits), replace(small, host_bytes=300 * page))
    disk = checked(trace_of(*visits), replace(small, host_bytes=110 * page, disk_bytes=400 * page))
    assert cold.hit_rate_by_tier["device"] < 0.1
    assert host.hit_rate_by_tier["host"] > 0.25
    assert disk.hit_rate_by_tier["disk"] > 0.25
    assert host.ttft[2] < disk.ttft[2] < cold.ttft[2]
    moved = 99 * page
    assert host.ttft[2] > moved / SETUP.device.host_bytes_s
    assert disk.ttft[2] > moved / SETUP.device.disk_read_bytes_s + moved / SETUP.device.host_bytes_s * 0.5
    assert disk.moved_bytes["read"] >= 80 * page
    assert disk.most_bytes["disk"] <= 400 * page


def test_with_time_to_spare_the_simulator_hits_what_the_replay_hits() -> None:
    trace = load_trace(HERE / "mooncake_conversation_1000.jsonl.zst").head(150)
    for at, request in enumerate(trace.requests):
        request.arrival, request.output_tokens = 100.0 * at, 1
    setup = Setup(page_tokens=512, max_num_batched_tokens=8192, device_bytes=700 * 512 * 147_456)
    setup = replace(setup, device=replace(setup.device, memory_bytes=10**12))
    result = checked(trace, setup)
    # A partly filled last block is no page, and the last token of a prompt is always computed.
    expected = _whole_page_hits(trace, 700)
    assert result.hit_rate == pytest.approx(expected)
    assert expected > 0.03


def _whole_page_hits(trace: Trace, capacity: int) -> float:
    from tierax.cache.policies.lru import LRU
    from tierax.lab.replay import replay

    whole = [
        TraceRequest(r.arrival, r.blocks[: (r.prompt_tokens - 1) // 512], (r.prompt_tokens - 1) // 512 * 512, 1)
        for r in trace.requests
    ]  # fmt: skip
    hits = replay(Trace("whole", whole, 512), capacity, LRU())
    return hits.hit_tokens / trace.prompt_tokens


def test_runs_repeat_exactly() -> None:
    trace = load_trace(HERE / "mooncake_conversation_1000.jsonl.zst").head(25)
    setup = Setup(page_tokens=512, device_bytes=3 * 10**10, host_bytes=10**11, disk_bytes=10**11)
    first, second = (checked(trace, setup).as_json() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["ragpulse_0_trace.jsonl", "azure_llm_2023_conv_100.csv"])
def test_other_traces_run_too(name: str) -> None:
    trace = load_trace(HERE / name).head(30)
    result = checked(trace, replace(SETUP, host_bytes=10**9, disk_bytes=10**9))
    assert result.requests + result.refused == 30
    assert (result.hit_rate > 0) == name.startswith("ragpulse")


def test_without_a_cache_nothing_hits() -> None:
    visits = trace_of(*(request_of(10 * i, range(50)) for i in range(3)))
    result = checked(visits, replace(SETUP, caching=False, host_bytes=10**9, disk_bytes=10**9))
    assert (result.hit_rate, result.moved_bytes["save"]) == (0, 0)


def test_closed_sessions_think_after_the_answer_and_users_bound_what_is_under_way() -> None:
    turns = [
        request_of(1.0 * turn, range(10 + turn), session=name, turn=turn, think=7.0 if turn else None)
        for name in "ab"
        for turn in range(3)
    ]
    opened = checked(trace_of(*turns))
    closed = checked(trace_of(*turns), pace=Pace(closed=True))
    alone = checked(trace_of(*turns), pace=Pace(users=1))
    assert opened.seconds < 3
    assert 14 < closed.seconds < 15
    assert 28 < alone.seconds < 30
    fast = checked(trace_of(*turns), pace=Pace(rate=2.0))
    assert fast.seconds < opened.seconds


def test_what_cannot_be_served_is_counted_and_the_rest_goes_on() -> None:
    small = replace(SETUP, device_bytes=20 * SETUP.page_bytes)
    result = checked(trace_of(request_of(0, range(50)), request_of(1, range(5), output=0), request_of(2, range(5))), small)  # fmt: skip
    assert (result.requests, result.refused) == (1, 2)
    with pytest.raises(LabError, match=r"16.* GB of weights|more than the 16 GB"):
        Setup(device=device_of("tpu-v5e"), model=model_of("llama-3.1-8b"), device_bytes=10**10).device_pages()
    with pytest.raises(LabError, match="no room for a page"):
        Setup(model=model_of("llama-3.1-70b")).device_pages()
    with pytest.raises(LabError, match="no device 'abacus'"):
        device_of("abacus")


def test_the_bill_adds_up() -> None:
    result = checked(trace_of(request_of(0, range(100))), replace(SETUP, host_bytes=10**11, devices=2))
    bill, tokens = result.bill, 1604
    assert bill.accelerator == pytest.approx(2 * 2.5 * result.seconds / 3600 / tokens * 1e6)
    assert bill.dram == pytest.approx(100 * 0.05 / 730 * result.seconds / 3600 / tokens * 1e6, rel=1e-4)
    assert bill.total == pytest.approx(bill.accelerator + bill.dram + bill.ssd + bill.io)
    assert result.as_json()["usd_per_mtok"] == bill.total


def test_the_timeline_shows_what_the_tiers_hold() -> None:
    visits = trace_of(*(request_of(10 * i, range(100 * i, 100 * i + 100)) for i in range(5)))
    setup = replace(SETUP, device_bytes=150 * SETUP.page_bytes, host_bytes=10**9, disk_bytes=10**10)
    result = checked(visits, setup)
    times = [moment.seconds for moment in result.timeline]
    assert times == sorted(times)
    last = result.timeline[-1]
    assert last.used_bytes["disk"] > last.used_bytes["host"] > last.used_bytes["device"] > 0
    assert last.evicted_pages["device"] > 300
    assert result.as_json()["timeline"][-1]["moved_bytes"] == result.moved_bytes
