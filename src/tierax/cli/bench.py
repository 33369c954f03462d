"""`tierax bench NAME …`: hands the rest of the line to that benchmark."""

from __future__ import annotations

import importlib
import sys

from .parts import named_part

BENCHMARKS = {
    "cache": "what the tiers bring and cost: a table of five caches, first tokens by tier, copies, late disks",
    "kernels": "attention alone: every backend that serves here and simpler forms, against the bound",
    "load": "many clients on a running server, some of whom leave or send nonsense: speed, and what is left behind",
    "offline": "decode and prefill speed against the memory bound, the bare step and installed peers",
    "online": "conversations over HTTP on any OpenAI-compatible server: first tokens, throughput, cached share",
    "perplexity": "what the dtypes of weights and stored KV cost in quality, on a fixed text",
    "replay": "a trace on the real engine in real time, for comparison with tierax lab run",
    "radix": "host time of the prefix tree and the page allocator",
    "report": "a page of all that matters, with pictures: the article's table, tiers, sizes, prices, other engines",
    "structured": "constrained answers: whether they fit schemas of every keyword, and what they cost",
}
"""Name -> summary; each is a module of `tierax.bench` with `main(argv) -> int`."""
MODULES = {"report": "page"}
"""Those whose module has another name."""


def run(argv: list[str]) -> int:
    """Runs one benchmark and returns its exit code."""
    name = named_part(argv, "tierax bench", "benchmark", BENCHMARKS)
    if name is None:
        return 0 if argv else 2
    if not {"-h", "--help"} & set(argv):
        from ..bench.runs import machine, machine_line

        print(machine_line(machine()), file=sys.stderr, flush=True)
    return importlib.import_module(f"..bench.{MODULES.get(name, name)}", __package__).main(argv[1:])
