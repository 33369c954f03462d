"""What the tiers of the cache bring and cost: copies, first tokens, a table of five caches, random prompts, late disks.

Everything that a ratio compares is measured in the same run. Give the machine nothing else to do meanwhile; all of
it takes some forty minutes on two cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from . import agents
from .bounds import Clock
from .cache_engine import EngineMaker, PageSize
from .cache_jitter import jitter_targets, measure_jitter
from .cache_overhead import Burst, measure_overhead, overhead_targets
from .cache_table import measure_table, table_targets
from .cache_ttft import measure_ttft, ttft_targets
from .copies import measure_copies
from .pictures import Panel, bars, cumulative
from .report import Parser, number, table, write_report
from .targets import Target, targets_table

OPTIONS: dict[str, type] = {
    "dtype": str,
    "quantization": str,
    "kv_cache_dtype": str,
    "page_size": int,
    "schedule_policy": str,
    "max_num_batched_tokens": int,
    "shared_step_tokens": int,
    "compile_cache_dir": str,
}
"""Settings of all engines that can be given, by the names of `EngineConfig`."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """How much is measured."""

    workload: agents.Workload = field(default_factory=agents.Workload)
    first_token: int = 1900
    repeats: int = 4
    burst: Burst = field(default_factory=Burst)
    jitter_prompts: int = 20
    jitter_tokens: int = 384

    @property
    def limits(self) -> dict[str, int]:
        """Settings of engines that are just large enough."""
        burst = self.burst.prompt_tokens + self.burst.answer_tokens
        longest = max(self.workload.longest, self.first_token + 1, burst, self.jitter_tokens + 1)
        return {"max_num_seqs": self.workload.running, "context_length": longest}


QUICK = Shapes(
    agents.QUICK, first_token=512, repeats=2, burst=Burst(2, 256, 16), jitter_prompts=6, jitter_tokens=256
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every part is given."""

    maker: EngineMaker
    page: PageSize
    shapes: Shapes
    disk_parent: Path | None


@dataclass(frozen=True, slots=True)
class Part:
    """One of the things that are measured; `measure` gives keys of the report, `targets` judges them."""

    summary: str
    measure: Callable[[Plan], dict[str, Any]]
    targets: Callable[[dict[str, Any]], list[Target]]
    show: Callable[[dict[str, Any]], str]
    panel: Callable[[dict[str, Any]], Panel]
    """Of `--plot`."""


def main(argv: list[str] | None = None, clock: Clock = perf_counter) -> int:
    """Measures, and prints tables or JSON. Returns 1 if two rows' answers differ by more than a near tie."""
    parser = _parser()
    args = vars(parser.parse_args(argv))
    shapes = QUICK if args["quick"] else Shapes()
    if args["whole"]:
        shapes = replace(shapes, workload=replace(shapes.workload, uncached=None))
    disk_parent = None if args["disk_dir"] is None else Path(args["disk_dir"]).expanduser()
    if disk_parent is not None and not disk_parent.is_dir():
        parser.error(f"--disk-dir: {disk_parent} is no directory")
    names = list(dict.fromkeys(args["only"] or PARTS))
    options = {name: args[name] for name in OPTIONS if args[name] is not None}
    maker = EngineMaker(args["model"], clock, shapes.limits | options)

    def show(part: str, so_far: dict[str, Any]) -> None:
        print(PARTS[part].show(so_far), end="\n\n", flush=True)

    if args["json"] is None:
        report = measure(maker, shapes, names, disk_parent, show)
        print(verdicts(report))
    else:
        report = measure(maker, shapes, names, disk_parent)
        write_report(report, args["json"])
    parser.draw(args["plot"], *(PARTS[name].panel(report) for name in names))
    different = report.get("answers", {}).get("different", [])
    for one in different:
        print(f"tierax bench cache: error: answers differ: {one}", file=sys.stderr)
    return 1 if different else 0


def measure(
    maker: EngineMaker,
    shapes: Shapes,
    parts: Iterable[str],
    disk_parent: Path | None = None,
    done: Callable[[str, dict[str, Any]], None] = lambda part, so_far: None,
) -> dict[str, Any]:
    """The report of the named parts, with the verdict on each target. `done` hears of each part, and of all so far."""
    plan = Plan(maker, maker.page(), shapes, disk_parent)
    report: dict[str, Any] = {
        "model": maker.model,
        "page_tokens": plan.page.tokens,
        "page_bytes": plan.page.bytes,
        "workload": asdict(shapes.workload),
        "load_before": os.getloadavg()[0],
    }
    targets: list[Target] = []
    for name in parts:
        _say(PARTS[name].summary)
        started = maker.clock()
        report |= PARTS[name].measure(plan)
        report.setdefault("seconds", {})[name] = maker.clock() - started
        targets += PARTS[name].targets(report)
        done(name, report)
    report["targets"] = [target.as_json() for target in targets]
    return report


def verdicts(report: dict[str, Any]) -> str:
    """All targets in one table."""
    names = ("name", "value", "sense", "limit", "percent")
    text = targets_table(Target(**{key: target[key] for key in names}) for target in report["targets"])
    if report["workload"] | {"uncached": None} != asdict(agents.Workload(uncached=None)):
        text += "\nThe targets are meant for the whole workload; this was a smaller one."
    return text


def _copies(plan: Plan) -> dict[str, Any]:
    return {"copies": measure_copies(plan.page.bytes, clock=plan.maker.clock, directory=plan.disk_parent)}


def _copies_targets(report: dict[str, Any]) -> list[Target]:
    """By path; a copy between device and host is two passes, hence the lower share."""
    return [
        Target(
            f"{row['path']}: of the plain copy's speed",
            row["ratio"],
            ">=",
            0.8 if "cold" in row["path"] else 0.4,
        )
        for row in report["copies"]
    ]


def _show_copies(report: dict[str, Any]) -> str:
    rows = []
    for row in report["copies"]:
        plain = "memcpy" if "memcpy_gb_s" in row else "pread"
        rows.append(
            [
                row["path"],
                number(row["gb_s"]),
                f"{number(row[f'{plain}_gb_s'])} {plain}",
                f"{row['ratio']:.0%}",
            ]
        )
    return table(["copies of pages", "GB/s", "against", "ratio"], rows)


def _copies_panel(report: dict[str, Any]) -> Panel:
    speeds = {row["path"]: row["gb_s"] for row in report["copies"]}
    return bars(speeds, "GB/s", "Copies of pages")


def _ttft(plan: Plan) -> dict[str, Any]:
    shapes = plan.shapes
    return measure_ttft(
        plan.maker, plan.page, tokens=shapes.first_token, repeats=shapes.repeats, disk_parent=plan.disk_parent
    )


def _show_ttft(report: dict[str, Any]) -> str:
    times, detail = report["ttft_ms"], report["ttft"]
    rows = [
        [place, number(time), f"{time / times['cold']:.1%}", str(detail["recomputed_tokens"][place])]
        for place, time in times.items()
    ]
    rows.append(["memcpy of the same bytes", number(detail["memcpy_ms"])])
    rows += [[f"pread of the same bytes, {place}", number(ms)] for place, ms in detail["pread_ms"].items()]
    header = [f"first token of {detail['tokens']} tokens", "ms", "of cold", "recomputed"]
    return table(header, [row + [""] * (len(header) - len(row)) for row in rows])


def _ttft_panel(report: dict[str, Any]) -> Panel:
    title = f"First token of {report['ttft']['tokens']} tokens, by the place of their KV"
    return cumulative(report["ttft"]["all_ms"], "ms", title)


def _table(plan: Plan) -> dict[str, Any]:
    return measure_table(
        plan.maker, plan.shapes.workload, plan.page, disk_parent=plan.disk_parent, done=_say_row
    )


def _say_row(row: dict[str, Any]) -> None:
    """The whole takes long: what an interrupted run has found is not lost."""
    _say(
        f"{row['name']}: first token {row['ttft_ms_mean']:.0f} ms, {row['req_s']:.3f} requests/s, hits {row['hit_rate']:.1%}"
    )


def _show_table(report: dict[str, Any]) -> str:
    header = ["", "TTFT ms", "p50", "p99", "stddev", "TPOT ms", "req/s", "device MB", "hit rate"]
    header += ["device", "host", "disk", "own", "$/M tokens"]
    rows = []
    for row in report["configs"]:
        times = [row[f"ttft_ms_{name}"] for name in ("mean", "p50", "p99", "stddev")]
        rates = [row["hit_rate"], *row["hit_rate_by_tier"].values(), row["hit_rate_own"]]
        rows.append(
            [
                row["name"],
                *(f"{time:.0f}" for time in times),
                number(row["tpot_ms"]),
                f"{row['req_s']:.3f}",
                f"{row['device_kv_bytes'] / 1e6:.0f}",
                *(f"{rate:.1%}" for rate in rates),
                f"{row['usd_per_mtok']:.3f}",
            ]
        )
    workload, answers = report["workload"], report["answers"]
    most = max(row["requests"] for row in report["configs"])
    notes = [
        f"{most} requests of {workload['conversations']} conversations, at most {workload['running']} running."
        " own: hit rate behind the system prompts.",
        *(f"{row['name']}: {_sample(row)}" for row in report["configs"] if row["requests"] < most),
        f"An infinite cache hits {report['infinite_hit_rate']:.1%} (own: {report['infinite_hit_rate_own']:.1%}).",
        f"Answers that differ from an earlier row's: {len(answers['near_ties'])} at near ties,"
        f" {len(answers['different'])} otherwise.",
        report["usd_formula"],
    ]
    return "\n".join([table(header, rows), *notes])


def _table_panel(report: dict[str, Any]) -> Panel:
    times = {row["name"]: row["ttft_ms_mean"] for row in report["configs"]}
    return bars(times, "ms, mean", "Agents on five caches: time to the first token")


def _sample(row: dict[str, Any]) -> str:
    mean = f"{row['prompt_tokens_mean']:.0f} tokens in the mean"
    return (
        f"{row['requests']} of these requests ({mean}) stand for all, as without a cache none helps another."
    )


def _overhead(plan: Plan) -> dict[str, Any]:
    shapes = plan.shapes
    return measure_overhead(
        plan.maker, plan.page, burst=shapes.burst, repeats=shapes.repeats, disk_parent=plan.disk_parent
    )


def _show_overhead(report: dict[str, Any]) -> str:
    row = report["no_repeats"]
    rows = [
        ["device only, tok/s", number(row["tok_s_off"])],
        ["host and disk too, tok/s", number(row["tok_s_on"])],
        ["loss", f"{row['loss']:.1%}"],
        ["writes left at the end of a burst, s", number(row["drain_s"])],
    ]
    return table(["random prompts", ""], rows)


def _overhead_panel(report: dict[str, Any]) -> Panel:
    row = report["no_repeats"]
    speeds = {"device only": row["tok_s_off"], "host and disk too": row["tok_s_on"]}
    return bars(speeds, "tok/s", "Random prompts: the price of the tiers")


def _jitter(plan: Plan) -> dict[str, Any]:
    shapes = plan.shapes
    return measure_jitter(
        plan.maker,
        plan.page,
        prompts=shapes.jitter_prompts,
        tokens=shapes.jitter_tokens,
        disk_parent=plan.disk_parent,
    )


def _show_jitter(report: dict[str, Any]) -> str:
    rows = [
        [
            row["policy"],
            number(row["ttft_ms_mean"]),
            number(row["ttft_ms_stddev"]),
            number(max(row["ttft_ms"])),
            f"{row['hit_rate']:.1%}",
        ]
        for row in report["prefetch"]
    ]
    return table(["prefetch from a jittery disk", "TTFT ms", "stddev", "most", "hit rate"], rows)


def _jitter_panel(report: dict[str, Any]) -> Panel:
    times = {row["policy"]: row["ttft_ms"] for row in report["prefetch"]}
    return cumulative(times, "ms", "First tokens from a jittery disk")


PARTS = {
    "copies": Part("copies between the tiers", _copies, _copies_targets, _show_copies, _copies_panel),
    "ttft": Part("first tokens by tier", _ttft, ttft_targets, _show_ttft, _ttft_panel),
    "table": Part("agents on five caches", _table, table_targets, _show_table, _table_panel),
    "no-repeats": Part(
        "random prompts with and without tiers", _overhead, overhead_targets, _show_overhead, _overhead_panel
    ),
    "prefetch": Part(
        "prefetch policies on a jittery disk", _jitter, jitter_targets, _show_jitter, _jitter_panel
    ),
}
"""By the names that `--only` takes, in the order in which they are run."""


def _say(stage: str) -> None:
    print(f"measuring: {stage}", file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser("tierax bench cache", __doc__)
    parser.add_argument("--model", "--model-path", default="demo", metavar="MODEL", help="default: demo")
    parser.add_argument(
        "--quick", action="store_true", help="6 conversations, shorter prompts, fewer repetitions"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="all conversations without a cache too: a quarter of an hour more",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(PARTS),
        metavar="PART",
        help=f"{', '.join(PARTS)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--disk-dir",
        metavar="DIR",
        help=f"where the temporary disk caches go (default: {tempfile.gettempdir()})",
    )
    parser.add_outputs("a panel for each part")
    for name, kind in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help="as in tierax serve")
    return parser


if __name__ == "__main__":
    sys.exit(main())
