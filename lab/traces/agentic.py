"""Coding agents' sessions, compact: per request the length of the prefix shared with an earlier one, and new ids.

`hp = [back, n]`: the first n ids of the request `back` places earlier in the same list (0: none), then `hn`: ids, and
inclusive ranges `[a, b]`. Ids are local to a session; sub-agents are nested lists that begin at a time of their parent.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from itertools import islice
from typing import Any

from .trace import Trace, TraceRequest


def read(
    name: str,
    records: Iterable[dict[str, Any]],
    seed: int,
    session_rate: float,
    most_sessions: int | None = None,
) -> Trace:
    """Sessions start at random, `session_rate` per second in the mean; within one, times are as recorded."""
    rng, start, base = random.Random(seed), 0.0, 0
    requests: list[TraceRequest] = []
    block_tokens = 64
    for record in islice(records, most_sessions):
        block_tokens = record["block_size"]
        start += rng.expovariate(session_rate)
        base += _session(requests, record["requests"], record["id"], start, base, block_tokens)
    notes = [
        f"sessions carry relative times only: they start as a Poisson process, {session_rate:g} per second (seed {seed})"
    ]
    return Trace(name, requests, block_tokens, notes)


def _session(
    out: list[TraceRequest],
    records: list[dict[str, Any]],
    session: str,
    start: float,
    base: int,
    block_tokens: int,
) -> int:
    """Appends the requests of one list, nested ones as sessions of their own; returns how many ids it uses."""
    history: list[array[int]] = []
    most = 0
    for record in records:
        if "requests" in record:
            nested = f"{session}/{record['agent_id']}"
            most = max(
                most, _session(out, record["requests"], nested, start + record["t"], base, block_tokens)
            )
            continue
        back, count = record["hp"]
        blocks = history[-back][:count] if back else array("i")
        for new in record["hn"]:
            first, last = new if isinstance(new, list) else (new, new)
            blocks.extend(range(base + first, base + last + 1))
            most = max(most, last + 1)
        history.append(blocks)
        out.append(
            TraceRequest(
                arrival=start + record["t"],
                blocks=blocks,
                prompt_tokens=min(record["in"], len(blocks) * block_tokens),
                output_tokens=record["out"],
                session=session,
                turn=len(history) - 1,
                think=record.get("think_time") if len(history) > 1 else None,
            )
        )
    return most
