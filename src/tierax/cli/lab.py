"""`tierax lab NAME …`: hands the rest of the line to that part of the lab."""

from __future__ import annotations

import difflib
import importlib
import sys

from .errors import UsageError

PARTS = {
    "run": (
        "lab_run",
        "a trace through scheduler, cache and tiers in simulated time: hits, first tokens, cost",
    ),
    "oracle": ("lab_oracle", "hit rates of policies block by block, an infinite cache, and the optimum"),
    "sweep": ("lab_sweep", "policies by capacities, described by a TOML file, in parallel"),
    "plot": ("lab_plot", "pictures of a report"),
    "compare": ("lab_compare", "hold the simulator against the real engine on this machine"),
    "workload": ("lab_workload", "write synthetic conversations as a trace"),
}
"""Name -> its module here, which has `run(argv) -> int`, and its summary."""


def run(argv: list[str]) -> int:
    """Runs one part and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, PARTS))
        lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in PARTS.items()]
        text = "\n".join(["usage: tierax lab NAME …", "", "parts:", *lines])
        print(text, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, *rest = argv
    if name not in PARTS:
        near = difflib.get_close_matches(name, PARTS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PARTS)}"
        raise UsageError("tierax lab", f"the lab has no {name!r}; {hint}")
    return importlib.import_module(f".{PARTS[name][0]}", __package__).run(rest)
