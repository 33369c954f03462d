"""`tierax lab oracle`: how much of a trace a cache of so many blocks hits, under policies and at best."""

from __future__ import annotations

import sys
from typing import Any

from .lab_options import add_json_option, add_trace_options, counts, load_policy_of, names, read_trace
from .option import Parser

BELADY = "belady"


def run(argv: list[str]) -> int:
    parser = Parser(
        "tierax lab oracle",
        "Replay a trace block by block through the cache's tree (one tier, no time), and against the optimum.",
    )
    add_trace_options(parser)
    parser.add_argument(
        "--capacity-blocks",
        type=counts,
        default=[2000, 10000],
        metavar="N,…",
        help="capacities in blocks of the trace (default: 2000,10000)",
    )
    parser.add_argument(
        "--policies",
        type=names,
        default=["lru", "fifo", BELADY],
        metavar="NAME,…",
        help="eviction policies as in tierax serve, module:Class of one's own, and belady (default: lru,fifo,belady)",
    )
    add_json_option(parser)
    args = parser.parse_args(argv)
    for name in args.policies:
        if name != BELADY:
            load_policy_of(parser, "--policies", name)
    rows = measure(parser, args)

    from ..bench.report import write_json

    if args.json is not None:
        write_json(rows, args.json)
    else:
        print(_table(rows))
    return 0


def measure(parser: Parser, args: Any) -> list[dict[str, Any]]:
    from tqdm import tqdm

    from ..lab.oracle import belady, infinite
    from ..lab.replay import replay

    trace = read_trace(args)
    rows = [_row("infinite", None, infinite(trace))]
    work = [(name, capacity) for capacity in args.capacity_blocks for name in args.policies]
    for name, capacity in tqdm(work, unit="replay", disable=not sys.stderr.isatty()):
        if name == BELADY:
            rows.append(_row(name, capacity, belady(trace, [capacity])[capacity]))
        else:
            rows.append(
                _row(name, capacity, replay(trace, capacity, load_policy_of(parser, "--policies", name)))
            )
    return rows


def _row(policy: str, capacity: int | None, hits: Any) -> dict[str, Any]:
    return {
        "policy": policy,
        "capacity_blocks": capacity,
        "token_hit_rate": hits.token_hit_rate,
        "requests": hits.requests,
        "prompt_tokens": hits.prompt_tokens,
        "evicted_blocks": hits.evicted_blocks,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    """With the share of the way from LRU to the optimum that a policy goes, where both were asked for."""
    from ..bench.report import table

    rate = {(row["policy"], row["capacity_blocks"]): row["token_hit_rate"] for row in rows}
    cells = []
    for row in rows:
        capacity = row["capacity_blocks"]
        least, most = rate.get(("lru", capacity)), rate.get((BELADY, capacity))
        closed = ""
        if least is not None and most is not None and most > least:
            closed = f"{(row['token_hit_rate'] - least) / (most - least):.0%}"
        cells.append(
            [
                row["policy"],
                "" if capacity is None else f"{capacity:,}",
                f"{row['token_hit_rate']:.2%}",
                closed,
                f"{row['evicted_blocks']:,}",
            ]
        )
    return table(["policy", "blocks", "token hit rate", "of the gap LRU - Belady", "evicted blocks"], cells)
