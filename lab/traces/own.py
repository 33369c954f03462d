"""tierax's own format: JSON lines, first a header, then one request each. A server records it, `lab workload` writes it.

    {"format": "tierax-trace", "version": 1, "block_tokens": 16, "notes": [...]}
    {"arrival": 0.25, "prompt_tokens": 40, "output_tokens": 9, "blocks": ["6b0f…", 17, [18, 25]], "session": "s1", "turn": 0}

Blocks are numbers, inclusive ranges of numbers, or names (a recording's keyed hashes); they cover the prompt, and the
answer as far as it is known. `session`, `turn`, `think` and `tenant` may be absent.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from ..errors import TraceError
from .trace import Trace, TraceRequest

FORMAT = "tierax-trace"
VERSION = 1


def read(name: str, records: Iterable[dict[str, Any]]) -> Trace:
    """Raises `TraceError` for a version that is not known."""
    records = iter(records)
    header = next(records, {})
    if header.get("version") != VERSION:
        raise TraceError(f"is of version {header.get('version')!r}; this program reads version {VERSION}")
    ids: dict[str, int] = {}
    requests = [
        TraceRequest(
            arrival=float(record["arrival"]),
            blocks=_blocks(record["blocks"], ids),
            prompt_tokens=record["prompt_tokens"],
            output_tokens=record["output_tokens"],
            session=record.get("session", ""),
            turn=record.get("turn", 0),
            think=record.get("think"),
            tenant=record.get("tenant", ""),
        )
        for record in records
    ]
    # A recording notes a request when it ends.
    requests.sort(key=lambda request: request.arrival)
    return Trace(name, requests, header["block_tokens"], header.get("notes", []))


def write(trace: Trace, file: TextIO) -> None:
    """Writes a trace whose blocks are all of one size."""
    header = {"format": FORMAT, "version": VERSION, "block_tokens": trace.block_tokens, "notes": trace.notes}
    file.write(json.dumps(header) + "\n")
    for request in trace.requests:
        record: dict[str, Any] = {
            "arrival": round(request.arrival, 6),
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "blocks": _ranges(request.blocks),
        }
        if request.session:
            record |= {"session": request.session, "turn": request.turn}
        if request.think is not None:
            record["think"] = round(request.think, 6)
        if request.tenant:
            record["tenant"] = request.tenant
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


def write_file(trace: Trace, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        write(trace, file)


def _blocks(items: list[Any], ids: dict[str, int]) -> array[int]:
    """Names become numbers, in the order in which they come first; a file has names or numbers, not both."""
    blocks = array("i")
    for item in items:
        if isinstance(item, str):
            blocks.append(ids.setdefault(item, len(ids)))
        elif isinstance(item, int):
            blocks.append(item)
        else:
            first, last = item
            blocks.extend(range(first, last + 1))
    return blocks


def _ranges(blocks: array[int]) -> list[int | list[int]]:
    """Runs of following numbers as ranges."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return [first if first == last else [first, last] for first, last in runs]
