"""Which requests share a beginning: an order in which they meet, and where to cut it among workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

_FIELDS = ("cache_salt", "tools", "system", "instructions", "messages", "prompt", "input")
"""Of the protocols' bodies, in the order in which they become tokens."""
KEY_BYTES = 8192
"""Beyond so many bytes, requests that begin alike count as the same."""
_NEAR = 4
"""A cut may be moved by one part in so many of what a worker gets, to where the neighbours differ most."""

_T = TypeVar("_T")


def prefix_key(body: bytes) -> bytes:
    """What a request's prompt begins with. Requests sorted by it have those with long common beginnings side by side.

    Empty for what is no JSON object.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return b""
    return b"\n".join(bytes(fields[name]) for name in _FIELDS if name in fields)[:KEY_BYTES]


def cut(items: Sequence[_T], keys: Sequence[bytes], parts: int) -> list[Sequence[_T]]:
    """Cuts sorted items (with their keys) into at most `parts` runs of about one size, where neighbours have least in
    common; no run is empty."""
    size = len(items) / parts
    room = int(size / _NEAR)
    cuts = [0]
    for part in range(1, parts):
        middle = round(part * size)
        places = range(max(middle - room, cuts[-1] + 1), min(middle + room, len(items) - 1) + 1)
        if places:
            cuts.append(min(places, key=lambda at: (_shared(keys[at - 1], keys[at]), abs(at - middle))))
    cuts.append(len(items))
    return [items[start:end] for start, end in pairwise(cuts) if start < end]


def _shared(one: bytes, other: bytes) -> int:
    """How many leading bytes are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
