"""Step times out of benchmark reports: they come back as they were measured, and fill in what lies between."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from tierax.engine.plan import Row, StepPlan
from tierax.engine.request import Request, SamplingParams
from tierax.lab.calibration import MeasuredSteps, read_copies, read_steps
from tierax.lab.errors import LabError
from tierax.lab.presets import DEVICES

DECODE = {1: 0.010, 4: 0.013, 8: 0.017}
"""Rows -> seconds at no context."""
PER_TOKEN, PER_PAIR = 2e-6, 3e-8
CHUNK = {16: 0.015, 64: 0.030, 256: 0.100}
LIMIT = 256


def report() -> dict[str, Any]:
    """Of a machine that is exactly as the model assumes."""
    decode = [
        {"batch": rows, "context": context, "tok_s": rows / (seconds + rows * context * PER_TOKEN)}
        for rows, seconds in DECODE.items()
        for context in (100, 1000)
    ]
    prefill = [{"tokens": n, "tok_s": n / (s + n * (n + 1) / 2 * PER_PAIR)} for n, s in CHUNK.items()]
    long = 4 * LIMIT
    seconds = 4 * CHUNK[LIMIT] + long * (long + 1) / 2 * PER_PAIR
    prefill.append({"tokens": long, "tok_s": long / seconds})
    return {"decode": decode, "prefill": prefill, "limits": {"max_num_batched_tokens": LIMIT}}


@pytest.fixture
def steps(tmp_path: Path) -> MeasuredSteps:
    (tmp_path / "offline.json").write_text(json.dumps(report()))
    return read_steps(tmp_path / "offline.json")


def rows(count: int, start: int, size: int = 1, sample: bool = True) -> tuple[Row, ...]:
    request = Request("x", array("i", [1] * 4000), 4000, SamplingParams(), 0, frozenset(), 4001)
    return tuple(Row(request, start, size, sample=sample) for _ in range(count))


def test_what_was_measured_comes_back(steps: MeasuredSteps) -> None:
    assert steps.context_seconds == pytest.approx(PER_TOKEN)
    assert steps.pair_seconds == pytest.approx(PER_PAIR, rel=0.01)
    for count, seconds in DECODE.items():
        expected = seconds + count * 500 * PER_TOKEN
        assert steps.device_seconds(StepPlan(1, (), rows(count, 499))) == pytest.approx(expected)
    for size, seconds in CHUNK.items():
        expected = seconds + size * (size + 1) / 2 * PER_PAIR
        assert steps.device_seconds(StepPlan(1, rows(1, 0, size), ())) == pytest.approx(expected, rel=0.01)


def test_steps_are_padded_as_the_engine_pads_them(steps: MeasuredSteps) -> None:
    three, four = (steps.device_seconds(StepPlan(1, (), rows(n, 0))) for n in (3, 4))
    assert three == pytest.approx(four, rel=1e-3)
    small, large = (steps.device_seconds(StepPlan(1, rows(1, 0, n), ())) for n in (130, 256))
    assert small == pytest.approx(large, rel=0.02)


def test_a_mixed_step_takes_the_bucket_of_all_its_tokens(steps: MeasuredSteps) -> None:
    chunk = rows(1, 0, 60, sample=False)
    alone = steps.device_seconds(StepPlan(1, chunk, ()))
    mixed = steps.device_seconds(StepPlan(1, chunk, rows(4, 999)))
    assert mixed == pytest.approx(alone + 4 * 1000 * PER_TOKEN, rel=0.05)
    assert steps.device_seconds(StepPlan(1, chunk, rows(8, 999))) > 1.5 * mixed, "the next bucket"


def test_a_later_chunk_attends_to_more(steps: MeasuredSteps) -> None:
    first, later = (steps.device_seconds(StepPlan(1, rows(1, at, 256), ())) for at in (0, 2000))
    assert later - first == pytest.approx(256 * 2000 * PER_PAIR, rel=0.01)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "not JSON"),
        ("[]", "not a report"),
        ("{}", "no report of tierax bench offline"),
        (json.dumps(report() | {"prefill": report()["prefill"][:1]}), "are needed"),
    ],
)
def test_a_report_that_does_not_tell_enough_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(LabError, match=problem):
        read_steps(tmp_path / "x.json")


def test_copies_take_their_speed_from_the_cache_benchmark(tmp_path: Path) -> None:
    speeds = {"device->host": 4.0, "host->device": 3.0, "disk->host cold": 0.3, "disk->host warm": 0.9}
    path = tmp_path / "cache.json"
    path.write_text(json.dumps({"copies": [{"path": p, "gb_s": s} for p, s in speeds.items()]}))
    device = read_copies(path, DEVICES["this-cpu"])
    assert (device.host_bytes_s, device.disk_read_bytes_s) == (3e9, 0.9e9)
    path.write_text("{}")
    with pytest.raises(LabError, match="no copies"):
        read_copies(path, device)
