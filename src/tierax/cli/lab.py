"""`tierax lab NAME …`: hands the rest of the line to that part of the lab."""

from __future__ import annotations

import importlib

from .parts import named_part

PARTS = {
    "run": "a trace through scheduler, cache and tiers in simulated time: hits, first tokens, cost",
    "oracle": "hit rates of policies block by block, an infinite cache, and the optimum",
    "sweep": "policies by capacities, described by a TOML file, in parallel",
    "plot": "pictures of a report",
    "compare": "hold the simulator against the real engine on this machine",
    "workload": "write synthetic conversations as a trace",
}
"""Name -> summary; each is a module `lab_NAME` here with `run(argv) -> int`."""


def run(argv: list[str]) -> int:
    """Runs one part and returns its exit code."""
    name = named_part(argv, "tierax lab", "part", PARTS)
    if name is None:
        return 0 if argv else 2
    return importlib.import_module(f".lab_{name}", __package__).run(argv[1:])
