"""Traces in every format that the lab reads: what comes out of slices of the real files, and what is refused."""

from __future__ import annotations

import builtins
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from tierax.lab.errors import TraceError
from tierax.lab.traces.own import write_file
from tierax.lab.traces.read import Options, load_trace
from tierax.lab.traces.trace import Trace, TraceRequest

HERE = Path(__file__).parent / "traces"
MOONCAKE = HERE / "mooncake_conversation_1000.jsonl.zst"


def test_mooncake_has_blocks_of_512_tokens_and_its_rounded_arrivals_are_spread() -> None:
    trace = load_trace(MOONCAKE)
    assert (len(trace.requests), trace.block_tokens) == (1000, 512)
    first = trace.requests[0]
    assert (first.prompt_tokens, first.output_tokens, list(first.blocks)) == (6758, 500, list(range(14)))
    assert trace.prompt_sizes(first) == [512] * 13 + [102]
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 1000
    assert "3 s" in trace.notes[0]
    assert [r.arrival for r in load_trace(MOONCAKE).requests] == arrivals
    other = [r.arrival for r in load_trace(MOONCAKE, options=Options(seed=1)).requests]
    assert other != arrivals
    assert [int(at // 3) for at in other] == [int(at // 3) for at in arrivals]


def test_agentic_sessions_are_decoded_and_share_nothing_with_each_other() -> None:
    trace = load_trace(HERE / "agentic_claude_code_4.compact.jsonl")
    sessions: dict[str, list[TraceRequest]] = {}
    for request in trace.requests:
        sessions.setdefault(request.session, []).append(request)
        assert 0 <= len(request.blocks) * 64 - request.prompt_tokens < 64
    nested = [name for name in sessions if "/" in name]
    assert len(sessions) - len(nested) == 4
    assert nested, "a sub-agent is a session of its own"
    tops = [set().union(*(r.blocks for r in sessions[name])) for name in sessions if "/" not in name]
    assert not set.intersection(tops[0], tops[1])
    for requests in sessions.values():
        assert [r.turn for r in requests] == list(range(len(requests)))
        assert requests[0].think is None
    longest = max(sessions.values(), key=len)
    assert longest[1].blocks[: len(longest[0].blocks)] == longest[0].blocks, "the second turn goes on"
    few = load_trace(HERE / "agentic_claude_code_4.compact.jsonl", options=Options(most_sessions=1))
    assert len({r.session.partition("/")[0] for r in few.requests}) == 1


def test_ragpulse_takes_the_lengths_of_its_blocks_from_the_files_beside_it(tmp_path: Path) -> None:
    trace = load_trace(HERE / "ragpulse_0_trace.jsonl")
    assert len(trace.requests) == 60
    for request in trace.requests:
        assert sum(trace.prompt_sizes(request)) == request.prompt_tokens
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals)
    (tmp_path / "ragpulse_0_trace.jsonl").write_bytes((HERE / "ragpulse_0_trace.jsonl").read_bytes())
    with pytest.raises(TraceError, match=r"no file \*sys_prompt.jsonl"):
        load_trace(tmp_path / "ragpulse_0_trace.jsonl")


def test_azure_shares_no_block() -> None:
    trace = load_trace(HERE / "azure_llm_2023_conv_100.csv")
    blocks = [block for request in trace.requests for block in request.blocks]
    assert len(trace.requests) == 100
    assert len(set(blocks)) == len(blocks)
    assert trace.requests[1].arrival == pytest.approx(4.314579)


def test_our_own_format_comes_back_as_it_was_written(tmp_path: Path) -> None:
    requests = [
        TraceRequest(0.5, array("i", [0, 1, 2, 9]), 60, 3, session="a", turn=1, think=2.5, tenant="t"),
        TraceRequest(0.75, array("i", [7]), 16, 1),
    ]
    write_file(Trace("x", requests, 16, ["note"]), tmp_path / "x.jsonl")
    assert "[[0,2],9]" in (tmp_path / "x.jsonl").read_text()
    trace = load_trace(tmp_path / "x.jsonl")
    assert (trace.name, trace.block_tokens, trace.notes) == ("x", 16, ["note"])
    assert [_fields(r) for r in trace.requests] == [_fields(r) for r in requests]


def _fields(request: TraceRequest) -> list[Any]:
    return [getattr(request, name) for name in TraceRequest.__slots__]


def test_names_of_blocks_become_numbers_and_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_text(
        '{"format": "tierax-trace", "version": 1, "block_tokens": 16}\n'
        '{"arrival": 2, "prompt_tokens": 32, "output_tokens": 1, "blocks": ["aa", "bb"]}\n'
        '{"arrival": 1, "prompt_tokens": 32, "output_tokens": 1, "blocks": ["aa", "cc"], "session": "s", "think": 3}\n'
    )
    early, late = load_trace(path).requests
    assert (early.arrival, late.arrival) == (1.0, 2.0)
    assert early.blocks[0] == late.blocks[0]
    assert early.blocks[1] != late.blocks[1]
    assert (early.session, early.think, late.session) == ("s", 3, "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no format that is known"),
        ("hello\n", "no format that is known"),
        ('{"timestamp": 0, "hash_ids": [1]}\n', "no field 'input_length'"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n{"timest', "line 2 is not JSON"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["x"]}\n', "not what the format has"),
        ('{"format": "tierax-trace", "version": 7}\n', "version 7"),
        ('{"format": "tierax-trace", "version": 1, "block_tokens": 16}\n', "no request"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_with_its_problem(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=problem) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


def test_without_zstandard_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "zstandard", raising=False)
    real = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name == "zstandard":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(TraceError, match=r"tierax\[lab\]"):
        load_trace(MOONCAKE)
