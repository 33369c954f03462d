"""`tierax lab compare`: the same small workloads on the real engine and in the simulator, side by side.

The simulator knows the machine from `tierax bench` alone, never from the runs that it is compared with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .lab_options import add_json_option
from .option import Parser

PAGE = 16
DECODE = ("1x64", "1x512", "1x1500", "2x256", "4x64", "4x512", "8x256")
PREFILL = (16, 32, 64, 128, 256, 512, 1024, 2048)
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "shared_step_tokens": 128}


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, and the cache that it meets; sizes in tokens."""

    name: str
    workload: dict[str, Any]
    """Fields of `lab.workload.Workload` that differ from `SMALL`."""
    users: int
    device_tokens: int
    host_tokens: int = 0
    disk: bool = False
    write_policy: str = "write_through"


SMALL = {
    "sessions": 12,
    "turns": 3.0,
    "most_turns": 5,
    "systems": 3,
    "system_tokens": 256,
    "first_tokens": 160,
    "user_tokens": 60,
    "answer_tokens": 24,
    "spread": 0.4,
    "think": 0.2,
    "seed": 7,
}
CASES = (
    Case("conversations, device", {}, users=3, device_tokens=16_384),
    Case(
        "conversations, host",
        {"seed": 8, "systems": 6},
        users=4,
        device_tokens=3072,
        host_tokens=16_384,
        write_policy="write_back",
    ),
    Case("long prompts, device", {"seed": 9, "turns": 1.0, "sessions": 16, "first_tokens": 700}, 2, 8192),
)
FIGURES = ("hit_rate", "ttft_ms_mean", "ttft_ms_p99", "tpot_ms", "req_s")


def run(argv: list[str]) -> int:
    parser = Parser("tierax lab compare", "Hold the simulator against the real engine on this machine.")
    parser.add_argument(
        "--model", default="demo", metavar="MODEL", help="what the engine loads (default: demo)"
    )
    parser.add_argument(
        "--preset", default="smollm2-135m", metavar="NAME", help="the same model in the lab (default: smollm2-135m)"
    )  # fmt: skip
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="a report of tierax bench offline, in place of measuring now; it needs several shapes",
    )
    parser.add_argument(
        "--keep-calibration", type=Path, metavar="FILE", help="where to leave what was measured"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of every figure of the calibration"
    )
    add_json_option(parser)
    args = parser.parse_args(argv)
    rows = compare(args)

    from ..bench.report import write_json

    if args.json is not None:
        write_json(rows, args.json)
    else:
        print(_table(rows))
    return 0


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    from ..lab.calibration import read_copies, read_steps
    from ..lab.presets import device_of, model_of

    model, device = model_of(args.preset), device_of("this-cpu")
    rows = []
    with tempfile.TemporaryDirectory(prefix="tierax-compare-") as place:
        offline, copies = args.calibration, Path(place) / "copies.json"
        if offline is None:
            offline = args.keep_calibration or Path(place) / "offline.json"
            shapes = ["--decode", *DECODE, "--prefill", *map(str, PREFILL), "--repeats", str(args.repeats)]
            _bench("offline", args.model, [*shapes, *_flags(LIMITS), "--json", str(offline)])
        _bench("cache", args.model, ["--quick", "--only", "copies", "--json", str(copies)])
        steps, device = read_steps(offline), read_copies(copies, device)
        for case in CASES:
            trace = Path(place) / "trace.jsonl"
            rows.append(_compare(case, args.model, model, device, steps, trace))
    return rows


def _compare(case: Case, name: str, model: Any, device: Any, steps: Any, path: Path) -> dict[str, Any]:
    from ..lab.arrivals import Pace
    from ..lab.setup import Setup
    from ..lab.simulate import simulate
    from ..lab.traces.own import write_file
    from ..lab.traces.read import load_trace
    from ..lab.workload import Workload, make_workload

    trace = make_workload(Workload(**{**SMALL, **case.workload}), case.name)
    for request in trace.requests:
        # The model says what it likes, so nothing is known of the answers: not of their beginnings either, which share a
        # block with the prompt's end.
        request.blocks = request.blocks[: request.prompt_tokens // trace.block_tokens]
    write_file(trace, path)
    trace = load_trace(path)
    kv_bytes = model.kv_bytes_per_token(device.kv_itemsize) * PAGE
    setup = Setup(
        model=model,
        device=device,
        page_tokens=PAGE,
        device_bytes=case.device_tokens // PAGE * kv_bytes,
        host_bytes=case.host_tokens // PAGE * kv_bytes,
        disk_bytes=10**10 if case.disk else 0,
        write_policy=case.write_policy,
        measured=steps,
        **LIMITS,
    )
    predicted = simulate(trace, setup, Pace(users=case.users)).as_json(timeline=False, cdf=False)
    options = {
        "page_size": PAGE,
        "context_length": 4096,
        # One page of a pool is scratch.
        "device_cache_size": (case.device_tokens // PAGE + 1) * kv_bytes,
        "host_cache_size": case.host_tokens // PAGE * kv_bytes,
        "write_policy": case.write_policy,
        "users": case.users,
    }
    out = path.with_name("measured.json")
    flags = [*_flags(options | LIMITS), *(["--disk"] if case.disk else [])]
    _bench("replay", name, ["--trace", str(path), *flags, "--json", str(out)])
    measured = json.loads(out.read_text(encoding="utf-8"))
    return {
        "name": case.name,
        "requests": measured["requests"],
        "predicted": {figure: predicted[figure] for figure in (*FIGURES, "hit_rate_by_tier")},
        "measured": {figure: measured[figure] for figure in (*FIGURES, "hit_rate_by_tier")},
    }


def _flags(options: dict[str, Any]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _bench(name: str, model: str, flags: Sequence[str]) -> None:
    """Runs a benchmark in a process of its own, as the lab never loads jax."""
    print(f"tierax bench {name}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "tierax", "bench", name, "--model", model, *flags]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1) or (done.returncode and name != "offline"):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError("tierax lab compare", f"tierax bench {name} failed: {last}")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    from ..bench.report import number, table

    cells = []
    for row in rows:
        for figure in FIGURES:
            predicted, measured = row["predicted"][figure], row["measured"][figure]
            share = figure == "hit_rate"
            off = (
                f"{100 * (predicted - measured):+.2f} points" if share else f"{predicted / measured - 1:+.1%}"
            )
            shown = [f"{x:.2%}" if share else number(x) for x in (predicted, measured)]
            cells.append([f"{row['name']}: {figure}", *shown, off])
    return table(["", "predicted", "measured", "off by"], cells)
