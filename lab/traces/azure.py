"""Azure's LLM traces of 2023: times and lengths only. No two prompts share anything here: a negative control."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterable
from datetime import datetime

from .trace import Trace, TraceRequest

BLOCK_TOKENS = 512


def read(name: str, lines: Iterable[str]) -> Trace:
    """Every block gets an id of its own."""
    requests: list[TraceRequest] = []
    began: datetime | None = None
    next_id = 0
    for row in csv.DictReader(lines):
        # Seven digits of a second's fraction; datetime takes six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        began = began or at
        tokens = int(row["ContextTokens"])
        count = -(-tokens // BLOCK_TOKENS)
        requests.append(
            TraceRequest(
                arrival=(at - began).total_seconds(),
                blocks=array("i", range(next_id, next_id + count)),
                prompt_tokens=tokens,
                output_tokens=int(row["GeneratedTokens"]),
            )
        )
        next_id += count
    return Trace(
        name, requests, BLOCK_TOKENS, ["the trace names no prefixes: every prompt stands for itself"]
    )
