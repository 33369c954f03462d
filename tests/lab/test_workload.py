"""Synthetic conversations: the shape that a preset promises, and that turns grow out of each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tierax.lab.errors import LabError
from tierax.lab.oracle import infinite
from tierax.lab.tokens import known_tokens
from tierax.lab.traces.own import write_file
from tierax.lab.traces.read import load_trace
from tierax.lab.workload import BLOCK_TOKENS, PRESETS, Workload, make_workload

SMALL = Workload(sessions=40, systems=4, seed=5)


def test_the_chat_preset_has_the_shape_that_it_says() -> None:
    trace = make_workload(PRESETS["sharegpt"])
    requests = trace.requests
    assert PRESETS["sharegpt"].sessions == 1000
    assert len(requests) / 1000 == pytest.approx(3.7, rel=0.05)
    assert trace.prompt_tokens / len(requests) == pytest.approx(4200, rel=0.05)
    thinks = [request.think for request in requests if request.think is not None]
    assert np.mean(thinks) == pytest.approx(20, rel=0.1)
    assert 0.7 < infinite(trace).token_hit_rate < 0.9


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    trace = make_workload(SMALL)
    sessions: dict[str, list[tuple[bytes, bytes]]] = {}
    for request in sorted(trace.requests, key=lambda r: (r.session, r.turn)):
        prompt, answer = known_tokens(trace, request)
        assert (len(prompt), len(answer)) == (request.prompt_tokens, request.output_tokens)
        sessions.setdefault(request.session, []).append((prompt.tobytes(), answer.tobytes()))
    assert len(sessions) == 40
    assert max(len(turns) for turns in sessions.values()) > 2
    for turns in sessions.values():
        for (prompt, answer), (following, _) in pairwise(turns):
            assert following.startswith(prompt + answer)
            assert len(following) > len(prompt + answer)


def test_sessions_share_their_system_prompt_and_nothing_else() -> None:
    trace = make_workload(replace(SMALL, zipf=1.5, sessions=200))
    firsts = [request for request in trace.requests if request.turn == 0]
    system_blocks = SMALL.system_tokens // BLOCK_TOKENS
    popularity = Counter(request.blocks[0] for request in firsts)
    assert len(popularity) == 4
    assert popularity.most_common()[0][1] > 2 * popularity.most_common()[-1][1]
    tails = [block for request in firsts for block in request.blocks[system_blocks:]]
    assert len(set(tails)) == len(tails)


def test_a_seed_fixes_everything_and_a_file_keeps_it(tmp_path: Path) -> None:
    write_file(make_workload(SMALL), tmp_path / "a.jsonl")
    write_file(make_workload(SMALL), tmp_path / "b.jsonl")
    write_file(make_workload(replace(SMALL, seed=6)), tmp_path / "c.jsonl")
    a, b, c = ((tmp_path / f"{name}.jsonl").read_text() for name in "abc")
    assert a == b != c
    again = load_trace(tmp_path / "a.jsonl")
    for read, made in zip(again.requests, make_workload(SMALL).requests, strict=True):
        assert (read.blocks, read.session, read.turn) == (made.blocks, made.session, made.turn)


def test_no_session_passes_the_longest_but_for_a_first_turn() -> None:
    trace = make_workload(replace(SMALL, longest=4000, turns=30.0))
    later = [r.prompt_tokens + r.output_tokens for r in trace.requests if r.turn]
    assert later
    assert max(later) <= 4000


def test_less_than_a_turn_is_refused() -> None:
    with pytest.raises(LabError, match="at least one"):
        Workload(turns=0.5)
