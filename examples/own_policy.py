"""A policy of one's own in twenty lines, held against others on a trace: python examples/own_policy.py TRACE [BLOCKS].

The same class serves: `tierax serve --eviction-policy examples/own_policy.py:Returning`.
"""

from __future__ import annotations

import sys

from tierax.cache.policies.registry import Evictable, EvictionPolicy, Use, load_policy
from tierax.lab.oracle import belady
from tierax.lab.replay import replay
from tierax.lab.traces.read import load_trace

GRACE = 60.0
"""Seconds that a use is worth, for what has been used before."""


class Returning(EvictionPolicy):
    """LRU, but what came back once is treated as if it had been used a minute later for every time that it did."""

    def touch(self, item: Evictable, use: Use) -> None:
        uses = 0 if item.rank is None else item.rank[1] + 1
        item.rank = (use.now + GRACE * min(uses, 3), uses)

    def priority(self, item: Evictable) -> float:
        return item.rank[0]


def main() -> None:
    trace = load_trace(sys.argv[1])
    blocks = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    rates = {name: replay(trace, blocks, load_policy(name)).token_hit_rate for name in ("lru", "hazard")}
    rates["Returning"] = replay(trace, blocks, Returning()).token_hit_rate
    rates["optimum"] = belady(trace, [blocks])[blocks].token_hit_rate
    way = rates["optimum"] - rates["lru"]
    for name, rate in rates.items():
        closed = f"  {(rate - rates['lru']) / way:6.1%} of the way from lru" if way > 0 else ""
        print(f"{name:10} {rate:6.2%}{closed}")


if __name__ == "__main__":
    main()
