"""A trace served by a real engine in real time: what the lab's simulation of the same trace is held against.

Tokens stand for the trace's blocks, so prompts share what the trace says; nothing of them means anything. Answers are the
model's own: a trace's next turn does not contain them, and finds its last prompt only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..engine.request import Request
from ..lab.arrivals import Arrivals, Pace
from ..lab.errors import LabError
from ..lab.tokens import known_tokens
from ..lab.traces.read import load_trace
from ..lab.traces.trace import Trace
from .bounds import Clock
from .cache_engine import WAIT, Driver, EngineMaker
from .cache_table import TIERS, Served
from .report import Parser, number, table, write_report

OPTIONS: dict[str, type] = {
    "page_size": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "shared_step_tokens": int,
    "context_length": int,
    "device_cache_size": str,
    "host_cache_size": str,
    "eviction_policy": str,
    "write_policy": str,
    "prefetch_policy": str,
    "schedule_policy": str,
    "compile_cache_dir": str,
}
"""Settings of the engine that can be given, by the names of `EngineConfig`."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a trace was like on the real engine."""

    served: list[Served]
    late: list[float]
    """By request: seconds from its arrival to the moment at which the engine heard of it."""
    seconds: float


def serve(
    driver: Driver,
    trace: Trace,
    pace: Pace,
    clock: Clock,
    sleep: Callable[[float], None] = time.sleep,
) -> Replayed:
    """Sends the requests at their times, and turns the loop until all have ended."""
    arrivals = Arrivals(trace, pace)
    vocabulary = driver.engine.model_config.vocab_size
    live: dict[Request, tuple[int, float]] = {}
    served: list[Served] = []
    late: list[float] = []
    began = clock()
    while True:
        now = clock() - began
        while (at := arrivals.next_time()) is not None and at <= now:
            at, number = arrivals.pop()
            wanted = trace.requests[number]
            prompt = [token % vocabulary for token in known_tokens(trace, wanted)[0]]
            live[driver.send(prompt, wanted.output_tokens)] = (number, at)
            now = clock() - began
        if not live:
            if at is None:
                return Replayed(served, late, now)
            # What is owed to the tiers is done while nobody waits.
            if not driver.engine.loop.idle:
                driver.turn()
            else:
                sleep(min(max(at - now, 0.0), WAIT))
            continue
        driver.turn()
        for request in [r for r in live if r.finished_at is not None]:
            number, at = live.pop(request)
            driver.finish([request])
            served.append(Served.of(request))
            late.append(max(request.arrival - began - at, 0.0))
            arrivals.ended(number, clock() - began)


def summarize(replayed: Replayed) -> dict[str, Any]:
    """Figures by the names that the lab uses; times in milliseconds."""
    served = replayed.served
    ttft = 1e3 * (np.array([s.ttft for s in served]) + np.array(replayed.late))
    prompted = sum(s.prompt_tokens for s in served)
    return {
        "requests": len(served),
        "prompt_tokens": prompted,
        "output_tokens": sum(s.output_tokens for s in served),
        "seconds": replayed.seconds,
        "hit_rate": sum(s.cached_tokens for s in served) / prompted,
        "hit_rate_by_tier": {tier: sum(s.cached.get(tier, 0) for s in served) / prompted for tier in TIERS},
        "ttft_ms_mean": float(ttft.mean()),
        "ttft_ms_p50": float(np.percentile(ttft, 50)),
        "ttft_ms_p99": float(np.percentile(ttft, 99)),
        "tpot_ms": 1e3 * float(np.mean([s.tpot for s in served if s.output_tokens > 1] or [0.0])),
        "req_s": len(served) / replayed.seconds,
    }


def main(argv: list[str] | None = None, clock: Clock = perf_counter) -> int:
    parser = _parser()
    args = vars(parser.parse_args(argv))
    try:
        trace = load_trace(args["trace"])
    except (LabError, OSError) as error:
        parser.error(str(error))
    pace = Pace(args["rate"], args["closed"], args["users"])
    options = {name: args[name] for name in OPTIONS if args[name] is not None}
    with tempfile.TemporaryDirectory(prefix="tierax-bench-") as directory:
        if args["disk"]:
            options["host_disk_cache_dir"] = directory
        maker = EngineMaker(args["model"], clock, options, progress=sys.stderr.isatty())
        with maker.open() as driver:
            report = summarize(serve(driver, trace, pace, clock))
            driver.settle()
    if args["json"] is not None:
        write_report(report, args["json"])
    else:
        rows = [[name, number(value)] for name, value in report.items() if isinstance(value, (int, float))]
        print(table([trace.name, ""], rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("tierax bench replay", __doc__)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="as in tierax lab run")
    parser.add_argument("--model", "--model-path", default="demo", metavar="MODEL", help="default: demo")
    parser.add_argument("--rate", type=float, default=1.0, metavar="X", help="as in tierax lab run")
    parser.add_argument("--closed", action="store_true", help="as in tierax lab run")
    parser.add_argument("--users", type=int, metavar="N", help="as in tierax lab run")
    parser.add_argument("--disk", action="store_true", help="with a disk cache in a temporary directory")
    for name, kind in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help="as in tierax serve")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is the standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
