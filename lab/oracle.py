"""What no policy can beat: a cache without bounds, and Belady's choice for a bounded one, closed under prefix.

Both see the same block-level replay as `replay`. Belady drops what is used again furthest in the future, and does not
even keep what comes new if that is it (bypass). A block is used whenever a block behind it is, so it never has its next
use later than those: dropping the furthest, of equals the deepest, leaves a tree that is closed under prefix by itself.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from .replay import Hits
from .traces.trace import Trace

NEVER = 1 << 60


@dataclass(slots=True)
class _Paths:
    """A trace's requests as nodes of one prefix tree: a node is a block with all that comes before it."""

    nodes: list[array[int]]
    """Per request, from the head."""
    sizes: list[list[int]]
    depth: array[int]
    """By node."""


def infinite(trace: Trace) -> Hits:
    """Hits when nothing ever leaves."""
    hits, seen = Hits(), 0
    paths = _paths(trace)
    for nodes, sizes in zip(paths.nodes, paths.sizes, strict=True):
        # Nodes are numbered as they come, and what is new on a path is its tail.
        hits.count(sizes, sum(node < seen for node in nodes))
        seen = max(seen, nodes[-1] + 1) if nodes else seen
    return hits


def belady(trace: Trace, capacities: Sequence[int]) -> dict[int, Hits]:
    """Hits of the optimal choice, by capacity in blocks."""
    paths = _paths(trace)
    next_uses = _next_uses(paths)
    return {capacity: _belady(paths, next_uses, capacity) for capacity in capacities}


def _paths(trace: Trace) -> _Paths:
    children: dict[tuple[int, int], int] = {}
    roots: dict[str, int] = {}
    paths = _Paths([], [], array("i"))
    for request in trace.requests:
        sizes = trace.prompt_sizes(request)
        node, nodes = roots.setdefault(request.tenant, -1 - len(roots)), array("i")
        for at, block in enumerate(request.blocks[: len(sizes)]):
            child = children.setdefault((node, block), len(children))
            if child == len(paths.depth):
                paths.depth.append(at)
            nodes.append(child)
            node = child
        paths.nodes.append(nodes)
        paths.sizes.append(sizes)
    return paths


def _next_uses(paths: _Paths) -> list[list[int]]:
    """Per request and node: the number of the next request that uses it."""
    last: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(paths.nodes) - 1, -1, -1):
        nodes = paths.nodes[number]
        found.append([last.get(node, NEVER) for node in nodes])
        last.update(dict.fromkeys(nodes, number))
    return found[::-1]


def _belady(paths: _Paths, next_uses: list[list[int]], capacity: int) -> Hits:
    hits = Hits()
    due: dict[int, int] = {}
    """Cached node -> its next use."""
    furthest: list[tuple[int, int, int]] = []
    """(-next use, -depth, node), with entries that are no longer true."""
    for nodes, sizes, uses in zip(paths.nodes, paths.sizes, next_uses, strict=True):
        hits.count(sizes, sum(node in due for node in nodes))
        for node, use in zip(nodes, uses, strict=True):
            if use == NEVER:
                due.pop(node, None)
            else:
                due[node] = use
                heapq.heappush(furthest, (-use, -paths.depth[node], node))
        while len(due) > capacity:
            use, _, node = heapq.heappop(furthest)
            if due.get(node) == -use:
                del due[node]
                hits.evicted_blocks += 1
    return hits
