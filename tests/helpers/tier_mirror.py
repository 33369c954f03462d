"""What a router knows of a cache: sets of blocks, out of nothing but the messages that were published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tierax.cache.page_events import PageEvent
from tierax.cache.radix_tree import Node
from tierax.cache.tiered_tree import TieredTree
from tierax.serving.events.messages import block_hash, encode_batch

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"


class TierMirror:
    """The blocks of each medium; every event must fit to what was told before."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {GPU: set(), CPU: set(), STORAGE: set()}
        self.tokens: dict[int, list[int]] = {}
        """Of blocks that were ever told with their tokens."""
        self.cleared = 0

    def hear(self, events: Iterable[PageEvent], page_size: int) -> None:
        """Takes events by way of their encoding."""
        self.take(encode_batch(events, ts=1.5, page_size=page_size, encoding="array"))

    def take(self, payload: bytes) -> None:
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(ts, float)
        assert rank == 0
        for event in events:
            self.apply(event)

    def apply(self, event: list[Any]) -> None:
        match event:
            case ["BlockStored", hashes, parent, tokens, page_size, None, medium, None]:
                held = self.blocks[medium]
                # Writes to a disk end in any order.
                assert medium == STORAGE or parent is None or parent in held, "a block before its head"
                assert not held.intersection(hashes), "stored, but it was there"
                assert len(set(hashes)) == len(hashes) > 0
                assert len(tokens) in (0, len(hashes) * page_size)
                held.update(hashes)
                for at, one in enumerate(hashes):
                    if tokens:
                        self.tokens[one] = tokens[at * page_size : (at + 1) * page_size]
            case ["BlockRemoved", hashes, medium]:
                assert self.blocks[medium].issuperset(hashes), "removed, but it was not there"
                self.blocks[medium].difference_update(hashes)
            case ["AllBlocksCleared"]:
                self.cleared += 1
                for held in self.blocks.values():
                    held.clear()
            case _:
                raise AssertionError(f"no event: {event}")


def blocks_in(tree: TieredTree) -> dict[str, set[int]]:
    """What device and host really hold."""
    found: dict[str, set[int]] = {GPU: set(), CPU: set()}
    for node, _ in walk(tree):
        for medium, run in zip((GPU, CPU), node.runs, strict=True):
            found[medium].update(block_hash(key) for key in node.page_keys()[: len(run.pages)])
    return found


def walk(tree: TieredTree) -> Iterator[tuple[Node, bytes]]:
    """Every node, and its namespace."""
    for node in tree.tree.nodes():
        yield node, bytes(node.path()[0].key)
