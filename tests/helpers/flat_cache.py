"""A cache of single pages that drives a policy through the eviction queue, and one reference per policy.

The references are plain transcriptions of what the papers say, with lists and no queue; both answer the same question: which
accesses of a trace hit.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tierax.cache.eviction_queue import EvictionQueue
from tierax.cache.policies.registry import EvictionPolicy, Use


@dataclass(eq=False)
class Item:
    """Something to evict."""

    identity: Hashable
    end: int = 1
    size: int = 1
    rank: Any = None
    head: Item | None = None

    @property
    def identities(self) -> tuple[Hashable]:
        return (self.identity,)

    def __repr__(self) -> str:
        return f"Item({self.identity!r})"


class FlatCache:
    """`capacity` items of one page each."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        policy.capacity = capacity
        self.queue: EvictionQueue[Item] = EvictionQueue(policy)
        self.items: dict[Hashable, Item] = {}
        self.tick = 0

    def access(self, name: Hashable, depth: int = 1, now: float | None = None) -> bool:
        """Whether it was a hit; a miss puts it in."""
        self.tick += 1
        use = Use(self.tick, self.tick if now is None else now)
        item = self.items.get(name)
        hit = item is not None
        if item is None:
            if len(self.items) == self.capacity:
                self.drop(self.queue.pop(use))
            item = self.items[name] = Item(name, depth)
        self.queue.discard(item)
        self.policy.touch(item, use)
        self.queue.add(item)
        if self.tick % 16 == 0:
            self.queue.check(self.items.values())
        return hit

    def drop(self, item: Item) -> None:
        del self.items[item.identity]
        self.policy.evicted(item)

    def run(self, trace: Iterable[int]) -> list[bool]:
        return [self.access(name) for name in trace]


def mixed_trace(seed: int, length: int = 3000, names: int = 200) -> list[int]:
    """Skewed accesses whose favourites change half way, with a scan of names used once in every 300 accesses."""
    rng = random.Random(seed)
    trace: list[int] = []
    fresh = 10_000
    while len(trace) < length:
        shift = 0 if len(trace) < length // 2 else names // 2
        for _ in range(240):
            trace.append((int(names * rng.random() ** 3) + shift) % names)
        trace += range(fresh, fresh + 60)
        fresh += 60
    return trace[:length]


def reference_lru(trace: Iterable[int], capacity: int) -> Iterator[bool]:
    stack: list[int] = []
    for name in trace:
        yield name in stack
        if name in stack:
            stack.remove(name)
        elif len(stack) == capacity:
            stack.pop(0)
        stack.append(name)


def reference_fifo(trace: Iterable[int], capacity: int) -> Iterator[bool]:
    queue: list[int] = []
    for name in trace:
        yield name in queue
        if name not in queue:
            if len(queue) == capacity:
                queue.pop(0)
            queue.append(name)


def reference_greedy_dual(
    trace: Iterable[int], capacity: int, cost: dict[int, float] | None = None
) -> Iterator[bool]:
    """LFU with dynamic ageing; with a cost by name (1 unless given), GDSF of items of one size."""
    inflation = 0.0
    value: dict[int, float] = {}
    uses: dict[int, int] = {}
    last: dict[int, int] = {}
    for now, name in enumerate(trace):
        yield name in value
        if name not in value and len(value) == capacity:
            victim = min(value, key=lambda held: (value[held], last[held]))
            inflation = value.pop(victim)
            del uses[victim]
        uses[name] = uses.get(name, 0) + 1
        value[name] = inflation + uses[name] * (cost or {}).get(name, 1.0)
        last[name] = now


def reference_slru(trace: Iterable[int], capacity: int) -> Iterator[bool]:
    """Demotes at once, at the hit that makes the protected segment too large."""
    probation: list[int] = []
    protected: list[int] = []
    for name in trace:
        yield name in probation or name in protected
        if name in protected:
            protected.remove(name)
            protected.append(name)
        elif name in probation:
            probation.remove(name)
            protected.append(name)
            if len(protected) > 0.8 * capacity:
                probation.append(protected.pop(0))
        else:
            if len(probation) + len(protected) == capacity:
                (probation or protected).pop(0)
            probation.append(name)


def reference_s3fifo(trace: Iterable[int], capacity: int) -> Iterator[bool]:
    """Looks again at the sizes of both queues after every object that it moves."""
    small: list[list[int]] = []
    main: list[list[int]] = []
    ghosts: list[int] = []
    for name in trace:
        found = next((held for held in small + main if held[0] == name), None)
        yield found is not None
        if found is not None:
            found[1] = min(found[1] + 1, 3)
            continue
        gone = len(small) + len(main) < capacity
        while not gone:
            if (small and len(small) >= 0.1 * capacity) or not main:
                tail = small.pop(0)
                if tail[1] > 1:
                    main.append([tail[0], 0])
                else:
                    ghosts.append(tail[0])
                    del ghosts[: -int(0.9 * capacity)]
                    gone = True
            else:
                tail = main.pop(0)
                gone = tail[1] == 0
                if not gone:
                    main.append([tail[0], tail[1] - 1])
        if name in ghosts:
            ghosts.remove(name)
            main.append([name, 0])
        else:
            small.append([name, 0])
