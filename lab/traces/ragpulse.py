"""RAGPulse: prompts put together from a system prompt, passages, history, web results and the question."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import TraceError
from .trace import Trace, TraceRequest

PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""In the order in which they make up a prompt."""
LENGTHS = {
    "sys_prompt": "sys_prompt_id",
    "passages": "passage_id",
    "history": "history_id",
    "user_input": "user_input_id",
    "web_search": "web_search_id",
}
"""The files with the tokens of every id, by the end of their names, and the id's field in them."""
TYPICAL_TOKENS = 512


def read(name: str, records: Iterable[dict[str, Any]], lengths: Mapping[int, int]) -> Trace:
    """Blocks are of their own lengths. The file is not in order of time; the requests are."""
    requests = []
    for record in records:
        blocks = array("i", [block for part in PARTS for block in record["hash_ids"][part]])
        unknown = [block for block in blocks if block not in lengths]
        if unknown:
            raise TraceError(f"nothing says how long block {unknown[0]} is")
        sizes = tuple(lengths[block] for block in blocks)
        requests.append(
            TraceRequest(
                arrival=float(record["timestamp"]),
                blocks=blocks,
                prompt_tokens=sum(sizes),
                output_tokens=record["output_length"],
                sizes=sizes,
            )
        )
    requests.sort(key=lambda request: request.arrival)
    notes = ["a prompt is as long as its blocks; the few tokens of the template between them are left out"]
    return Trace(name, requests, TYPICAL_TOKENS, notes)
