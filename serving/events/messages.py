"""KV events as other engines write them down, so that routers which read theirs read ours.

A message's payload is a batch in MessagePack, `[ts, events, data_parallel_rank]`. An event, in the form `array`:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

and in the form `map` the same fields by these names, with the tag under `type`. Fields and their order are those of
vLLM's `vllm/distributed/kv_events.py` and SGLang's `sglang/srt/disaggregation/kv_events.py` (both wrote arrays until
2026, maps since); the decoders of llm-d (`pkg/kvevents/engineadapter` of llm-d-kv-cache and llm-d-router) want the
first seven fields, and older ones of them all eight, neither more nor fewer.

A block is a page. Its hash is an unsigned 64-bit integer: the last 8 bytes, big-endian, of the page's key (see
`cache/page_keys.py`), so it is the same in every replica that computes the same KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from ...engine.page_events import TIER_NAMES, Cleared, PageEvent, Removed, Stored

MEDIUMS = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
"""Tier -> what the other engines call it."""

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
)
_REMOVED = ("block_hashes", "medium")
_encode = msgspec.msgpack.Encoder().encode


def block_hash(key: bytes) -> int:
    """What a page's key becomes in an event."""
    return int.from_bytes(key[-8:], "big")


def encode_batch(
    events: Iterable[PageEvent], *, ts: float, page_size: int, encoding: str, rank: int = 0
) -> bytes:
    """The payload of a message; `ts` in seconds since 1970, `rank` the number of the model's copy."""
    shown = [_array(event, page_size) for event in events]
    return _encode([ts, shown if encoding == "array" else [_map(event) for event in shown], rank])


def _array(event: PageEvent, page_size: int) -> list[Any]:
    match event:
        case Stored(tier, keys, parent, tokens):
            hashes = [block_hash(key) for key in keys]
            above = None if parent is None else block_hash(parent)
            token_ids = array("i", tokens).tolist()
            return ["BlockStored", hashes, above, token_ids, page_size, None, _medium(tier), None]
        case Removed(tier, keys):
            return ["BlockRemoved", [block_hash(key) for key in keys], _medium(tier)]
        case Cleared():
            return ["AllBlocksCleared"]


def _map(event: list[Any]) -> dict[str, Any]:
    tag, *fields = event
    names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(tag, ())
    return {"type": tag, **dict(zip(names, fields, strict=True))}


def _medium(tier: int) -> str:
    return MEDIUMS[TIER_NAMES[tier]]
