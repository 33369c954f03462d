"""How many requests per second the prefix cache's host side serves, alone: match, lock, insert, unlock, evict.

The stream is made of multi-turn conversations that interleave and share system prompts; see `Workload`.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from ..cache.manager import CacheManager
from .pictures import bars
from .report import Parser, table, write_report
from .runs import medians, spreads


@dataclass(frozen=True)
class Workload:
    """Conversations of `turns` turns, `concurrent` at a time in random order; system prompts by a Pareto law."""

    conversations: int = 1000
    systems: int = 20
    system_tokens: int = 512
    turns: int = 6
    user_tokens: int = 64
    answer_tokens: int = 64
    concurrent: int = 64
    vocabulary: int = 49152
    seed: int = 1


@dataclass(frozen=True)
class Result:
    """One page size's figures; the times are means per request."""

    page_size: int
    requests: int
    requests_s: float
    hit_rate: float
    match_us: float
    evict_us: float
    insert_us: float
    release_us: float
    evicted_pages: int


def conversation_stream(workload: Workload) -> Iterator[tuple[array[int], array[int]]]:
    """Pairs of a prompt and the same with its answer, in order of arrival."""
    rng = random.Random(workload.seed)

    def words(count: int) -> array[int]:
        return array("i", rng.choices(range(workload.vocabulary), k=count))

    systems = [words(workload.system_tokens) for _ in range(workload.systems)]
    waiting = workload.conversations
    live: list[tuple[array[int], int]] = []
    while live or waiting:
        while waiting and len(live) < workload.concurrent:
            live.append((systems[min(int(rng.paretovariate(1.0)) - 1, workload.systems - 1)], 0))
            waiting -= 1
        chosen = rng.randrange(len(live))
        history, turn = live[chosen]
        prompt = history + words(workload.user_tokens)
        full = prompt + words(workload.answer_tokens)
        yield prompt, full
        if turn + 1 < workload.turns:
            live[chosen] = (full, turn + 1)
        else:
            live[chosen] = live[-1]
            live.pop()


def measure(
    requests: Sequence[tuple[array[int], array[int]]],
    page_size: int,
    capacity_tokens: int,
    clock: Callable[[], float] = perf_counter,
) -> Result:
    """Serves the requests one after another from an empty cache. Each of the four calls is timed by itself."""
    cache = CacheManager(capacity_tokens // page_size, page_size)
    spans = [0.0] * 4
    cached = prompted = 0
    begin = clock()
    for prompt, full in requests:
        t0 = clock()
        lease = cache.open(b"", prompt, len(prompt) - 1)
        t1 = clock()
        cached += lease.num_shared
        prompted += len(prompt)
        if not cache.grow(lease, len(full)):
            raise ValueError(f"a request of {len(full)} tokens does not fit into {capacity_tokens}")
        t2 = clock()
        cache.commit(lease, full, len(full))
        t3 = clock()
        cache.release(lease)
        t4 = clock()
        spans[0] += t1 - t0
        spans[1] += t2 - t1
        spans[2] += t3 - t2
        spans[3] += t4 - t3
    seconds = clock() - begin
    cache.check()
    count = len(requests)
    match_us, evict_us, insert_us, release_us = (span / count * 1e6 for span in spans)
    return Result(
        page_size=page_size,
        requests=count,
        requests_s=count / seconds,
        hit_rate=cached * page_size / prompted,
        match_us=match_us,
        evict_us=evict_us,
        insert_us=insert_us,
        release_us=release_us,
        evicted_pages=cache.stats.evicted_pages,
    )


def main(argv: list[str] | None = None) -> int:
    parser = Parser("tierax bench radix", __doc__)
    parser.add_argument("--page-size", type=int, nargs="+", default=[1, 16], metavar="N")
    parser.add_argument("--capacity-tokens", type=int, default=200_000, metavar="N")
    parser.add_argument("--conversations", type=int, default=Workload.conversations, metavar="N")
    parser.add_argument("--seed", type=int, default=Workload.seed, metavar="N", help="of all that is drawn")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="medians of N runs are shown")
    parser.add_outputs("requests per second by page size")
    args = parser.parse_args(argv)
    sizes: list[int] = args.page_size
    if min(args.capacity_tokens, args.conversations, args.repeats, *sizes) < 1:
        parser.error("every number must be at least 1")

    workload = Workload(conversations=args.conversations, seed=args.seed)
    requests = list(conversation_stream(workload))
    try:
        results = [
            _together([measure(requests, size, args.capacity_tokens) for _ in range(args.repeats)])
            for size in sizes
        ]
    except ValueError as error:
        parser.error(str(error))

    if args.json is None:
        print(_table(results))
    else:
        report = {
            "workload": asdict(workload),
            "capacity_tokens": args.capacity_tokens,
            "repeats": args.repeats,
            "results": results,
        }
        write_report(report, args.json)
    speeds = {f"pages of {row['page_size']}": row["requests_s"] for row in results}
    parser.draw(args.plot, bars(speeds, "requests/s, median", "The prefix cache's host side alone"))
    return 0


def _together(runs: list[Result]) -> dict[str, Any]:
    """The medians of several runs, and how far they lie apart."""
    speeds = [{key: value for key, value in asdict(run).items() if isinstance(value, float)} for run in runs]
    return {**asdict(runs[0]), **medians(speeds), "spread": spreads(speeds)}


def _table(results: list[dict[str, Any]]) -> str:
    header = ["page", "requests/s", "least - most", "hit rate"]
    header += [f"{verb}, us" for verb in ("match", "evict", "insert", "release")]
    rows = [
        [
            str(row["page_size"]),
            f"{row['requests_s']:,.0f}",
            " - ".join(f"{value:,.0f}" for value in row["spread"]["requests_s"]),
            f"{row['hit_rate']:.3f}",
            *(f"{row[f'{verb}_us']:.1f}" for verb in ("match", "evict", "insert", "release")),
        ]
        for row in results
    ]
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
