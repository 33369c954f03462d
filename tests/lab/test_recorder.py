"""`--trace-out`: what a server records of its requests, and that the lab reads it as it was."""

from __future__ import annotations

import logging
import os
import stat
from array import array
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, SamplingParams
from tierax.engine.config import ConfigError
from tierax.engine.request import Request
from tierax.engine.trace_recorder import TraceRecorder
from tierax.lab.oracle import infinite
from tierax.lab.traces.read import load_trace

SECRET = "my password is swordfish, and nobody must know"


def request_of(prompt: list[int], output: int = 2, arrival: float = 5.0, namespace: bytes = b"") -> Request:
    tokens = array("i", [*prompt, *range(900, 900 + output)])
    return Request("r", tokens, len(prompt), SamplingParams(), 0, frozenset(), 99, namespace, arrival=arrival)


def record(path: Path, *requests: Request) -> None:
    recorder = TraceRecorder(str(path), 4, clock=lambda: 3.0)
    for request in requests:
        recorder.record(request)
    recorder.close()


def test_the_lab_reads_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    shared = list(range(8))
    record(
        tmp_path / "served.jsonl",
        request_of([*shared, 20, 21], arrival=6.5),
        request_of([*shared, 30], output=5, arrival=5.0),
        request_of(shared, namespace=b"tenant"),
        request_of([], output=0),
    )
    trace = load_trace(tmp_path / "served.jsonl")
    early, tenant, late = trace.requests
    assert trace.block_tokens == 4
    assert (early.arrival, early.prompt_tokens, early.output_tokens) == (2.0, 9, 5)
    assert (late.arrival, len(late.blocks)) == (3.5, 3)
    assert early.blocks[:2] == late.blocks[:2]
    assert early.blocks[2] != late.blocks[2]
    assert tenant.tenant
    assert not set(tenant.blocks) & set(late.blocks)
    assert infinite(trace).hit_tokens == 8


def test_a_page_is_named_with_all_that_comes_before_it(tmp_path: Path) -> None:
    record(tmp_path / "a.jsonl", request_of([1, 1, 1, 1, 1, 1, 1, 1]), request_of([2, 2, 2, 2, 1, 1, 1, 1]))
    first, second = load_trace(tmp_path / "a.jsonl").requests
    assert len(set(first.blocks) | set(second.blocks)) == len(first.blocks) + len(second.blocks)


def test_recordings_cannot_be_compared_with_each_other_nor_read_by_others(tmp_path: Path) -> None:
    for name in "ab":
        record(tmp_path / name, request_of([1, 2, 3, 4]))
    one, two = ((tmp_path / name).read_text().splitlines()[1] for name in "ab")
    assert one != two
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == 0o600


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists"):
        TraceRecorder(str(path), 4, clock=lambda: 0.0)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="No such file"):
        TraceRecorder(str(tmp_path / "no" / "served.jsonl"), 4, clock=lambda: 0.0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder(str(tmp_path / "x"), 4, clock=lambda: 0.0)
    recorder.close()
    recorder._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    with caplog.at_level(logging.ERROR):
        recorder.record(request_of([1, 2, 3]))
    recorder.record(request_of([1, 2, 3]))
    assert sum(record.message.endswith("the recording ends here") for record in caplog.records) == 1
    assert recorder._file.closed


def test_an_engine_records_what_it_served_and_no_text(tmp_path: Path) -> None:
    write_tiny_text_model(tmp_path / "model")
    path = tmp_path / "served.jsonl"
    options: dict[str, Any] = {
        "page_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "context_length": 128,
        "device_cache_size": "2MiB",
        "skip_warmup": True,
        "trace_out": str(path),
    }
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with LLM(tmp_path / "model", **options) as llm:
        (first,) = llm.generate(SECRET, params)
        llm.generate(SECRET + " else", params)
    text = path.read_text()
    assert "swordfish" not in text
    trace = load_trace(path)
    assert [r.output_tokens for r in trace.requests] == [3, 3]
    assert trace.requests[0].prompt_tokens == len(first.prompt_token_ids)
    shared = len(first.prompt_token_ids) // 4
    assert trace.requests[0].blocks[:shared] == trace.requests[1].blocks[:shared]
