"""Speed of one engine on one machine, without a server: against what the hardware allows, the bare step, and peers.

Everything that a ratio compares is measured in the same run. Give the machine nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from ..engine.llm import LLM
from .bounds import Clock, Machine, ModelCost, impossible, measure_machine
from .engine_speed import EngineSpeed, Series, model_cost
from .peers import llama_peer, transformers_peer
from .peers.find import model_file
from .peers.peer import PeerMissing, PeerTask
from .pictures import Panel, curve
from .report import Parser, number, table, write_report

PEERS: dict[str, Callable[[PeerTask, str], dict[str, Any]]] = {
    "transformers": transformers_peer.measure,
    "llama.cpp": llama_peer.measure,
    "llama.cpp-f16": partial(llama_peer.measure, weights="F16"),
    "llama.cpp-f32": partial(llama_peer.measure, weights="F32"),
}
OPTIONS: dict[str, type] = {
    "attention_backend": str,
    "dtype": str,
    "quantization": str,
    "page_size": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "shared_step_tokens": int,
    "context_length": int,
    "device_cache_size": str,
    "compile_cache_dir": str,
}
"""Settings of the engine that can be given, by the names of `EngineConfig`."""

BUSY_LOAD = 0.7
"""Load average above which others take part of the machine; torch, whose threads spin, then loses most of its speed."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is measured."""

    decode: tuple[tuple[int, int], ...] = ((1, 128), (1, 512), (1, 2048), (8, 200), (16, 200))
    """(running, context) pairs."""
    prefill: tuple[int, ...] = (512, 2048)
    bare: tuple[int, int] = (16, 200)
    """(running, context) of the comparison with the bare step."""
    first_token: int = 1900
    repeats: int = 5
    steps: int = 32
    buffer_bytes: int = 1 << 30

    def fitting(self, max_num_seqs: int, context_length: int) -> Shapes:
        """Without what the engine cannot run; fewer running and shorter prompts where a shape must stay."""
        room = context_length - self.steps - 32
        return replace(
            self,
            decode=tuple(d for d in self.decode if d[0] <= max_num_seqs and d[1] <= room),
            prefill=tuple(n for n in self.prefill if n <= room),
            bare=(min(self.bare[0], max_num_seqs), min(self.bare[1], room)),
            first_token=min(self.first_token, room),
        )


QUICK = Shapes(
    decode=((1, 128), (8, 200)),
    prefill=(512,),
    bare=(8, 200),
    first_token=512,
    repeats=2,
    steps=8,
    buffer_bytes=1 << 28,
)


def main(argv: list[str] | None = None, clock: Clock = perf_counter) -> int:
    """Measures, and prints a table or JSON. Returns 1 if a figure exceeds its bound, which is then no bound."""
    parser = _parser()
    args = vars(parser.parse_args(argv))
    options = {name: args[name] for name in OPTIONS if args[name] is not None}
    shapes = QUICK if args["quick"] else Shapes()
    shapes = replace(
        shapes,
        repeats=args["repeats"] or shapes.repeats,
        decode=tuple(args["decode"] or shapes.decode),
        prefill=tuple(args["prefill"] or shapes.prefill),
    )

    report = measure(args["model"], options, shapes, clock, _say)
    vs, python = dict.fromkeys(args["vs"]), args["peer_python"]
    report["peers"], report["missing"] = measure_peers(report, [(name, python) for name in vs])
    if args["json"] is None:
        print(table(*_rows(report)))
        for name, reason in report["missing"].items():
            print(f"{name}: {reason}")
    else:
        write_report(report, args["json"])
    contexts = dict.fromkeys(row["context"] for row in report["decode"])
    parser.draw(args["plot"], *(decode_panel(report, context) for context in contexts))
    for error in report["errors"]:
        print(f"tierax bench offline: error: {error}", file=sys.stderr)
    return 1 if report["errors"] else 0


def measure(
    model: str, options: dict[str, Any], shapes: Shapes, clock: Clock, say: Callable[[str], None]
) -> dict[str, Any]:
    """Our own figures, with the machine's bounds from before and after, whichever are higher.

    `say` is told what is being done.
    """
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        say(f"on a busy machine (load {load:.1f}): no figure of this run should be quoted")
    say("memory and arithmetic")
    before = measure_machine(clock, buffer_bytes=shapes.buffer_bytes, repeats=shapes.repeats)
    gc.collect()
    say("load and warm-up")
    started = clock()
    with LLM(model, skip_warmup=True, **options) as llm:
        loaded = clock()
        for _ in llm.engine.executor.warm_up():
            pass
        warm = clock()
        stats = llm.engine.stats
        compiled, from_disk = stats.compiles, stats.loaded_programs
        limits = asdict(llm.engine.loop.scheduler.limits)
        shapes = shapes.fitting(limits["max_num_seqs"], llm.engine.context_length)
        speed = EngineSpeed(llm, clock, repeats=shapes.repeats, steps=shapes.steps)
        say("decode")
        decode = {shape: speed.decode(*shape) for shape in shapes.decode}
        say("prefill")
        prefill = {tokens: speed.prefill(tokens) for tokens in shapes.prefill}
        say("the loop against the bare step")
        looped, bare = speed.decode_and_bare(*shapes.bare)
        say("first tokens")
        cold, again, cached = speed.first_token_again(shapes.first_token)
        cost = model_cost(llm)
        start = {
            "load_s": loaded - started,
            "warm_up_s": warm - loaded,
            "step_programs": llm.engine.executor.num_programs,
            "compiled": compiled,
            "loaded": from_disk,
            "compiled_after_warm_up": stats.compiles + stats.loaded_programs - compiled - from_disk,
        }
    del llm, speed
    gc.collect()
    after = measure_machine(clock, buffer_bytes=shapes.buffer_bytes, repeats=shapes.repeats)
    machine = Machine.best(before, after)
    report = _bounded(machine, cost, decode, prefill)
    report |= {
        "bare_step": {
            "batch": shapes.bare[0],
            "context": shapes.bare[1],
            **_figures(looped),
            "bare_tok_s": bare.median,
            "ratio": looped.median / bare.median,
        },
        "first_token": {
            "tokens": shapes.first_token,
            "cold_ms": 1e3 * cold.median,
            "again_ms": 1e3 * again.median,
            "ratio": again.median / cold.median,
            "cached_tokens": cached,
        },
        "start": start,
        "model": {
            "path": model,
            "weight_bytes": cost.weight_bytes,
            "kv_bytes_per_token": cost.kv_bytes_per_token,
        },
        "machine": {
            "read_gb_s": machine.read_bytes_s / 1e9,
            "read_method": machine.read_method,
            "read_buffer_bytes": machine.read_buffer_bytes,
            "matmul_gflop_s": machine.flop_s / 1e9,
            "cores": _cores(),
            "load_before": load,
        },
        "limits": limits,
        "steps": shapes.steps,
        "repeats": shapes.repeats,
    }
    return report


def _bounded(
    machine: Machine,
    cost: ModelCost,
    decode: dict[tuple[int, int], Series],
    prefill: dict[int, Series],
) -> dict[str, Any]:
    """Decode and prefill figures with their bounds, and `errors` for those that exceed them."""
    report: dict[str, Any] = {"decode": [], "prefill": [], "errors": []}
    for (batch, context), series in decode.items():
        bound = cost.decode_bound(machine, batch, context)
        report["decode"].append(
            {"batch": batch, "context": context, **_figures(series), "bound_tok_s": bound}
        )
        report["errors"].append(impossible(f"decode {batch} x {context}", series.median, bound))
    for tokens, series in prefill.items():
        bound = cost.prefill_bound(machine, tokens)
        report["prefill"].append({"tokens": tokens, **_figures(series), "bound_tok_s": bound})
        report["errors"].append(impossible(f"prefill of {tokens}", series.median, bound))
    report["errors"] = [error for error in report["errors"] if error is not None]
    return report


def _figures(series: Series) -> dict[str, float]:
    return {"tok_s": series.median, "tok_s_min": series.low, "tok_s_max": series.high}


def measure_peers(
    report: dict[str, Any], peers: Iterable[tuple[str, str]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures by name, and why those that are missing are; `peers` names each with an interpreter that has it."""
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, python in peers:
        task = PeerTask(
            model=str(model_file(report["model"]["path"])),
            decode=[(row["batch"], row["context"]) for row in report["decode"]],
            prefill=[row["tokens"] for row in report["prefill"]],
            steps=report["steps"],
            repeats=report["repeats"],
            threads=_cores(),
        )
        _say(name)
        try:
            found[name] = PEERS[name](task, python)
        except PeerMissing as error:
            missing[name] = str(error)
    return found, missing


def decode_panel(report: dict[str, Any], context: int) -> Panel:
    """Decode speed by how many run at that context: ours, and that of peers."""
    points: dict[str, list[tuple[float, float]]] = {}
    for name, figures in {"tierax": report, **report["peers"]}.items():
        for row in figures["decode"]:
            if row["context"] == context:
                points.setdefault(name, []).append((row["batch"], row["tok_s"]))
    return curve(points, "requests running", "tok/s", f"Decode at a context of {context}")


def _rows(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    peers: dict[str, Any] = report["peers"]
    header = ["", "tierax", "range", "against", "ratio"]
    header += [column for name in peers for column in (name, "tierax is")]
    rows: list[list[str]] = []

    def add(
        name: str, value: float, spread: str = "", against: str = "", ratio: str = "", theirs: Any = ()
    ) -> None:
        cells = [name, number(value), spread, against, ratio]
        for figure in theirs or [None] * len(peers):
            cells += ["", ""] if figure is None else [number(figure), f"{value / figure:.2f}x"]
        rows.append(cells)

    def add_bounded(name: str, row: dict[str, Any], kind: str, keys: tuple[str, ...]) -> None:
        theirs = [_find(peer[kind], row, keys) for peer in peers.values()]
        bound = row["bound_tok_s"]
        add(name, row["tok_s"], _spread(row), f"{number(bound)} bound", f"{row['tok_s'] / bound:.0%}", theirs)

    for row in report["decode"]:
        name = f"decode, {row['batch']} running, context {row['context']}, tok/s"
        add_bounded(name, row, "decode", ("batch", "context"))
    for row in report["prefill"]:
        add_bounded(f"prefill of {row['tokens']}, tok/s", row, "prefill", ("tokens",))
    bare, first, start, machine = (report[key] for key in ("bare_step", "first_token", "start", "machine"))
    name = f"engine loop, {bare['batch']} running, context {bare['context']}, tok/s"
    add(name, bare["tok_s"], _spread(bare), f"{number(bare['bare_tok_s'])} bare step", f"{bare['ratio']:.0%}")
    name = f"first token of {first['tokens']} tokens again ({first['cached_tokens']} cached), ms"
    add(name, first["again_ms"], "", f"{number(first['cold_ms'])} cold", f"{first['ratio']:.1%}")
    rows.append([f"memory read ({machine['read_method']}), GB/s", number(machine["read_gb_s"])])
    rows.append(["f32 matmul, GFLOP/s", number(machine["matmul_gflop_s"])])
    rows.append(["start: load, s", number(start["load_s"])])
    rows.append([f"start: warm-up of {start['step_programs']} step programs, s", number(start["warm_up_s"])])
    rows.append(["programs compiled after warm-up", str(start["compiled_after_warm_up"])])
    return header, [row + [""] * (len(header) - len(row)) for row in rows]


def _find(peer_rows: list[dict[str, Any]], ours: dict[str, Any], keys: tuple[str, ...]) -> float | None:
    """The peer's figure for the same shape."""
    same = (row["tok_s"] for row in peer_rows if all(row[key] == ours[key] for key in keys))
    return next(same, None)


def _spread(row: dict[str, Any]) -> str:
    return f"{number(row['tok_s_min'])}-{number(row['tok_s_max'])}"


def _say(stage: str) -> None:
    print(f"measuring: {stage}", file=sys.stderr, flush=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parser() -> Parser:
    parser = Parser("tierax bench offline", __doc__)
    parser.add_argument("--model", "--model-path", default="demo", metavar="MODEL", help="default: demo")
    parser.add_argument(
        "--vs",
        action="append",
        default=[],
        choices=list(PEERS),
        help="measure a peer too, if it is installed; may be repeated",
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PATH",
        help="an interpreter that has the peer's packages (default: this one)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions")
    parser.add_argument("--repeats", type=_positive, metavar="N", help="repetitions; medians are shown")
    parser.add_argument(
        "--decode",
        type=_shape,
        nargs="+",
        metavar="RxC",
        help="in place of the usual shapes: R running with contexts of C tokens, as in 8x200",
    )
    parser.add_argument(
        "--prefill", type=_positive, nargs="+", metavar="N", help="in place of the usual prompts: of N tokens"
    )
    parser.add_outputs("decode speed by how many run, a panel for each context")
    for name, kind in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        convert = _positive if kind is int else str
        parser.add_argument(
            flag, type=convert, metavar="N" if kind is int else "X", help="as in tierax serve"
        )
    return parser


def _shape(text: str) -> tuple[int, int]:
    running, x, context = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"{text!r} must be running x context, as in 8x200")
    return _positive(running), _positive(context)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
