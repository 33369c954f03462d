"""What requests hold of the cache, what they are told of it, and what is counted; only the manager changes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .radix_tree import Node


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on device pages, made by `CacheManager.open` and void after `release` or `reset`."""

    namespace: bytes
    pages: list[int]
    """The page table: page i holds tokens `[i * page_size, (i + 1) * page_size)`."""
    num_shared: int
    """Leading pages that belong to the tree, locked through `node`; the lease owns the others."""
    node: Node | None
    """The deepest locked node, where the shared pages end; None once the lease is void."""


@dataclass(slots=True, eq=False)
class Hold:
    """Host pages of a prefix that are to stay, made by `CacheManager.hold` and void after `drop`."""

    namespace: bytes
    node: Node | None
    """The deepest locked node, where the held pages end."""

    @property
    def num_pages(self) -> int:
        return 0 if self.node is None else self.node.end


class Match(NamedTuple):
    """Leading pages of a prompt: `device` of them on the device, `host` of them on the host."""

    device: int
    host: int

    @property
    def pages(self) -> int:
        return max(self)


@dataclass(slots=True)
class CacheStats:
    """Counters since the start; they only grow."""

    inserted_pages: int = 0
    """Pages that entered the tree on the device, computed or loaded."""
    duplicate_pages: int = 0
    """Pages computed although the tree held the same by the time of their commit."""
    evicted_pages: int = 0
    """Device pages dropped to make room."""
