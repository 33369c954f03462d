"""Conversations over HTTP on any OpenAI-compatible server: times to the first token, throughput, what came from its cache.

A conversation sends a turn, reads the answer to its end, thinks, and sends the next, with all that was said before it.
The same client measures every server; prompts are words that a seed draws, or those of a file, and the server's own usage says
how many tokens they were. The cached share is what the server tells, and missing where it tells nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from .online_client import Server, ServerError, Turn, play, served_model, summarize
from .peers.peer import PeerMissing
from .peers.servers import PEERS, PeerServer
from .pictures import Panel, cumulative
from .report import Parser, number, table, write_report
from .runs import medians, spreads
from .talks import WORKLOADS, Talk, TalkError, Workload, make_talks, read_talks

OF_FILES = Workload(0, 8, 0, 0, 0, 0, 0, 64)
"""What holds for the conversations of a file, unless flags say otherwise."""
SHOWN = {
    "TTFT of first turns, ms: mean / p50 / p99": "ttft_first_ms",
    "TTFT of later turns, ms": "ttft_later_ms",
    "TPOT, ms": "tpot_ms",
    "requests/s": "req_s",
    "output tok/s": "output_tok_s",
    "cached share of prompt tokens": "cached_share",
    "cached share, later turns": "cached_share_later",
    "requests": "requests",
    "seconds": "seconds",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    changed = {f.name: getattr(args, f.name) for f in fields(Workload) if getattr(args, f.name) is not None}
    workload = replace(WORKLOADS.get(args.workload, OF_FILES).scaled(args.scale), **changed)
    try:
        # Mistakes in the workload show before anything is measured.
        _talks(args.workload, workload)
    except TalkError as error:
        parser.error(str(error))
    server = Server(args.base_url, args.model or "", args.api_key or os.environ.get("OPENAI_API_KEY"))
    report: dict[str, Any] = {
        "base_url": args.base_url,
        "workload": {"name": args.workload, **asdict(workload)},
    }
    try:
        report |= measure(server, args.workload, workload, args.runs)
    except (ServerError, ClientError, OSError, TimeoutError) as error:
        parser.exit(1, f"tierax bench online: {args.base_url}: {str(error) or type(error).__name__}\n")
    report |= _measure_peers(args, workload)
    if args.json is not None:
        write_report(report, args.json)
    else:
        print(show(report))
    parser.draw(args.plot, _panel(report))
    return 0


def measure(server: Server, name: str, workload: Workload, runs: int = 1) -> dict[str, Any]:
    """The figures of a server: medians over the runs, each with a seed of its own, so that none finds another's prompts.

    Raises `ServerError`, `ClientError` or `OSError`.
    """
    found: list[dict[str, Any]] = []
    turns: list[Turn] = []
    if not server.model:
        server = replace(server, model=asyncio.run(served_model(server)))
    for number_of_run in range(runs):
        talks = _talks(name, replace(workload, seed=workload.seed + number_of_run))
        seconds, told = asyncio.run(play(server, talks, workload.running, progress=sys.stderr.isatty()))
        found.append(summarize(told, seconds))
        turns += told
    report = {"model": server.model, **medians(found), "runs": runs}
    if runs > 1:
        report["spread"] = spreads(found)
    ttft = {
        "first": sorted(1e3 * turn.first_token for turn in turns if turn.index == 0),
        "later": sorted(1e3 * turn.first_token for turn in turns if turn.index > 0),
    }
    return report | {"ttft_ms": ttft}


async def run(server: Server, workload: Workload, **options: Any) -> tuple[float, list[Turn]]:
    """Plays a workload once; `options` are those of `play`."""
    return await play(server, make_talks(workload), workload.running, **options)


def _talks(name: str, workload: Workload) -> list[Talk]:
    return make_talks(workload) if name in WORKLOADS else read_talks(Path(name), workload)


def _measure_peers(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """The same figures of each peer by name, and why those that are missing are."""
    peers: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(args.vs or ()):
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        try:
            with PeerServer(name, args.peer_model, args.peer_python, workload.running) as peer:
                peers[name] = measure(Server(peer.url, peer.model), args.workload, workload, args.runs)
        except (PeerMissing, ServerError, ClientError, OSError, TimeoutError) as error:
            missing[name] = str(error) or type(error).__name__
    return {"peers": peers, "missing": missing} if args.vs else {}


def show(report: dict[str, Any]) -> str:
    """One table, a column for each server."""
    columns = {report["model"]: report, **report.get("peers", {})}
    name, runs = report["workload"]["name"], report["runs"]
    title = Path(name).name + (f", medians of {runs} runs (least - most)" if runs > 1 else "")
    rows = [
        [label, *(_cell(figures, key, figures.get("spread")) for figures in columns.values())]
        for label, key in SHOWN.items()
    ]
    notes = [f"{peer}: {reason}" for peer, reason in report.get("missing", {}).items()]
    return "\n".join([table([title, *columns], rows), *notes])


def _cell(figures: dict[str, Any], key: str, spread: dict[str, Any] | None) -> str:
    value = figures[key]
    if key.startswith("cached"):
        return "not told" if value is None else f"{value:.1%}"
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " / ".join(number(value[part]) for part in ("mean", "p50", "p99"))
    if key == "requests":
        return f"{value:g}"
    text = number(value)
    return text if spread is None else f"{text} ({number(spread[key][0])} - {number(spread[key][1])})"


def _panel(report: dict[str, Any]) -> Panel:
    """How first tokens are distributed, a line for each server and kind of turn."""
    servers = {"tierax" if report.get("peers") else report["model"]: report, **report.get("peers", {})}
    lines = {
        f"{name}, {kind} turns": figures["ttft_ms"][kind]
        for name, figures in servers.items()
        for kind in ("first", "later")
        if figures["ttft_ms"][kind]
    }
    title = f"{Path(report['workload']['name']).name}: first tokens"
    return cumulative(lines, "time to the first token, ms", title)


def _parser() -> Parser:
    parser = Parser("tierax bench online", __doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", metavar="URL")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")
    parser.add_argument(
        "--workload",
        default="multiturn",
        type=_workload,
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOADS)}; or a file of conversations (JSON or JSON lines, OpenAI's or ShareGPT's form)",
    )
    for field in fields(Workload):
        kind = float if field.name in ("think", "arrivals", "turns", "spread") else int
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=_at_least_0(kind), metavar="N", help="instead of the workload's own")
    parser.add_argument(
        "--scale", type=_at_least_0(float), default=1.0, metavar="X", help="multiply the workload's lengths"
    )
    parser.add_argument(
        "--runs", type=runs_of, default=1, metavar="N", help="medians of so many, each with a seed of its own"
    )
    parser.add_argument(
        "--vs",
        action="append",
        choices=list(PEERS),
        help="start this server too, and measure it; may be repeated",
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter that has the peer's packages (default: this one)",
    )
    parser.add_argument(
        "--peer-model", default="demo", metavar="MODEL", help="what the peer serves (default: demo)"
    )
    parser.add_outputs("how first tokens are distributed")
    return parser


def _workload(text: str) -> str:
    if text not in WORKLOADS and not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be {', '.join(WORKLOADS)}, or a file that is there")
    return text


def runs_of(text: str) -> int:
    """For argparse: how often to measure."""
    if not text.isdecimal() or not 0 < int(text) < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _at_least_0(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not 0 <= value < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0")
        return value

    return convert


if __name__ == "__main__":
    sys.exit(main())
