"""Which KV heads of a page a process has in its rows, which of them it writes, and how to get one out of the other.

A row has, for every layer and token, K and V of its heads side by side: `[layers * page_size, heads, bytes of a head]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..page_keys import PageKey
from .names import PartKey, RecordKey
from .record import PAYLOAD_OFFSET, PageLayout, Part


class Heads(NamedTuple):
    """KV heads `[first, end)`, in the model's order."""

    first: int
    end: int


@dataclass(frozen=True)
class Share:
    """One process' share of every page."""

    layout: PageLayout
    """Of a whole page."""
    slots: int
    """Layers times tokens: stretches of a page that have all heads."""
    heads: int
    """Of the model."""
    held: Heads
    """Those in this process' rows."""
    written: tuple[Heads, ...]
    """By process, what each writes: all heads, each once. Empty ranges are at the end of those before them."""
    process: int = 0

    @classmethod
    def whole(cls, layout: PageLayout, slots: int = 1, heads: int = 1) -> Share:
        """Of a process that has all heads. (With one head pages cannot be in parts.)"""
        every = Heads(0, heads)
        return cls(layout, slots, heads, every, (every,))

    @classmethod
    def of(cls, layout: PageLayout, slots: int, held: Sequence[range], process: int) -> Share:
        """Of one of several processes, which hold consecutive heads, some of them perhaps in common."""
        written, first = [], 0
        for heads in held:
            end = max(heads.stop, first)
            written.append(Heads(first, end))
            first = end
        own = held[process]
        return cls(layout, slots, first, Heads(own.start, own.stop), tuple(written), process)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """How this process and those beside it write a page; empty if one of them writes it whole."""
        parts = tuple(Part(*heads, self.bytes_of(heads)) for heads in self.written if heads.end > heads.first)
        return parts if len(parts) > 1 else ()

    @cached_property
    def _layouts(self) -> dict[Heads, PageLayout]:
        """Of the records of a page in parts. The first is the page's own and lists them all."""
        return {
            Heads(*part[:2]): PageLayout(self.layout.shape, self.layout.dtype, (part,) if at else self.parts)
            for at, part in enumerate(self.parts)
        }

    @property
    def own(self) -> Heads:
        """What this process writes; perhaps nothing."""
        return self.written[self.process]

    @property
    def row_bytes(self) -> int:
        return self.bytes_of(self.held)

    @property
    def record_bytes(self) -> int:
        """Bytes of all records of a page."""
        return max(len(self.parts), 1) * PAYLOAD_OFFSET + self.layout.page_bytes

    def bytes_of(self, heads: Heads) -> int:
        return self.layout.page_bytes // self.heads * (heads.end - heads.first)

    def record_of(self, key: PageKey, heads: Heads) -> tuple[RecordKey, PageLayout]:
        """The record that has exactly these heads when processes like this one have written the page."""
        if not self.parts:
            return key, self.layout
        return key if heads.first == 0 else PartKey(key, *heads), self._layouts[heads]

    def copy(self, source: memoryview, has: Heads, target: memoryview, wants: Heads) -> None:
        """Copies heads that `source` has and `target` wants to their places there."""
        first, end = max(has.first, wants.first), min(has.end, wants.end)
        if first < end:
            into = self._by_head(target, wants)[:, first - wants.first : end - wants.first]
            np.copyto(into, self._by_head(source, has)[:, first - has.first : end - has.first])

    def _by_head(self, data: memoryview, heads: Heads) -> np.ndarray:
        return np.frombuffer(data, np.uint8).reshape(self.slots, heads.end - heads.first, -1)
