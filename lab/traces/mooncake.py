"""Mooncake's open traces: JSON lines with a timestamp in ms and one id per block of 512 tokens."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .trace import Trace, TraceRequest

BLOCK_TOKENS = 512
QUANTUM = 3.0
"""Seconds to which some of these traces round their timestamps, a few ms aside."""
SLACK = 0.01


def read(name: str, records: Iterable[dict[str, Any]], seed: int) -> Trace:
    """The requests in file order; arrivals that were rounded to 3 s are spread over them."""
    requests = [
        TraceRequest(
            arrival=record["timestamp"] / 1000,
            blocks=array("i", record["hash_ids"]),
            prompt_tokens=record["input_length"],
            output_tokens=record["output_length"],
        )
        for record in records
    ]
    notes = []
    if len(requests) > 1 and all(abs(r.arrival - QUANTUM * _quantum(r)) <= SLACK for r in requests):
        spread(requests, random.Random(seed))
        notes.append(
            f"arrivals were rounded to {QUANTUM:g} s; they are spread evenly over these (seed {seed})"
        )
    return Trace(name, requests, BLOCK_TOKENS, notes)


def spread(requests: list[TraceRequest], rng: random.Random) -> None:
    """Requests that share a rounded time arrive at random times of the quantum, in the order that they have."""
    groups = Counter(map(_quantum, requests))
    queues = {
        at: iter(sorted(QUANTUM * (at + rng.random()) for _ in range(count))) for at, count in groups.items()
    }
    for request in requests:
        request.arrival = next(queues[_quantum(request)])


def _quantum(request: TraceRequest) -> int:
    return round(request.arrival / QUANTUM)
