"""Many clients at once on a running server, some of whom leave or send nonsense: how fast it is, and what is left behind.

Every answer that is read to its end is held against the answer to the same request on the quiet server.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from .load_clients import Sample, Server, Tally, Workload, client, conversations, solo_run
from .report import Parser, number, table, write_report

MOST_TOLD = 5
"""Problems of one kind that are shown word for word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run's figures. Times in ms."""

    seconds: float
    requests: int
    requests_s: float
    finished: int
    left: int
    refused: int
    ties: int
    output_tok_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    loop_lag_ms_p99: float
    rss_mib: list[float]
    """Before, after a quarter of the time, and after all have left."""
    open_fds: list[float]
    """Before and after."""
    tasks: list[float]
    """Before and after."""
    pages_in_use: float
    """After."""
    problems: list[str]


async def run(server: Server, workload: Workload) -> Report:
    """Answers on the quiet server first, then the load; returns when the server is quiet again."""
    solos = [await solo_run(server, body) for body in conversations(workload)]
    before = await server.sample()
    tally, deadline = Tally(), time.perf_counter() + workload.seconds
    watch = asyncio.create_task(_after(server, workload.seconds / 4))
    clients = [
        asyncio.create_task(
            client(server, workload, solos, random.Random(f"{workload.seed}-{n}"), tally, deadline)
        )
        for n in range(workload.clients)
    ]
    started = time.perf_counter()
    await asyncio.gather(*clients)
    seconds = time.perf_counter() - started
    quarter, loaded = await watch, await server.sample()
    after = await _quiet(server)
    return _report(workload, tally, seconds, (before, quarter, loaded, after))


async def _after(server: Server, seconds: float) -> Sample:
    await asyncio.sleep(seconds)
    return await server.sample()


async def _quiet(server: Server, patience: float = 10.0) -> Sample:
    """The first sample of a server that has nothing to do, or the last one while it still has."""
    until = time.perf_counter() + patience
    while True:
        # Its gauges are a moment old, and connections take one to go.
        await asyncio.sleep(1.0)
        sample = await server.sample()
        if (not sample.busy and not sample.pages_in_use) or time.perf_counter() > until:
            return sample


def _report(
    workload: Workload, tally: Tally, seconds: float, samples: tuple[Sample, Sample, Sample, Sample]
) -> Report:
    before, quarter, loaded, after = samples
    requests = tally.finished + tally.left + tally.refused
    problems = [*tally.failed[:MOST_TOLD], *tally.unequal[:MOST_TOLD]]
    for count, what in (
        (len(tally.failed), "calls failed"),
        (len(tally.unequal), "answers differ from solo ones"),
    ):
        if count:
            problems.append(f"{count} {what}")
    if after.busy or after.pages_in_use:
        problems.append(f"{after.busy:g} requests and {after.pages_in_use:g} pages are still in use")
    if after.tasks > before.tasks + 2:
        problems.append(f"{after.tasks - before.tasks:g} tasks of the event loop are left over")
    if after.open_fds > before.open_fds + 2:
        problems.append(f"{after.open_fds - before.open_fds:g} file descriptors are left over")
    return Report(
        seconds=seconds,
        requests=requests,
        requests_s=requests / seconds,
        finished=tally.finished,
        left=tally.left,
        refused=tally.refused,
        ties=tally.ties,
        output_tok_s=tally.tokens / seconds,
        ttft_ms_p50=percentile(tally.ttft, 0.5) * 1e3,
        ttft_ms_p99=percentile(tally.ttft, 0.99) * 1e3,
        loop_lag_ms_p99=bucket_percentile(before.lag, loaded.lag, 0.99) * 1e3,
        rss_mib=[sample.rss_bytes / 2**20 for sample in (before, quarter, after)],
        open_fds=[before.open_fds, after.open_fds],
        tasks=[before.tasks, after.tasks],
        pages_in_use=after.pages_in_use,
        problems=problems,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def bucket_percentile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """An upper bound of a percentile of what was observed between two readings of a histogram's buckets."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[max(counts)]
    return next((bound for bound, count in counts.items() if count >= share * total), 0.0)


def main(argv: list[str] | None = None) -> int:
    parser = Parser("tierax bench load", __doc__)
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:30000", metavar="URL", help="of a running server"
    )
    parser.add_argument("--clients", type=int, default=Workload.clients, metavar="N", help="at the same time")
    parser.add_argument("--seconds", type=float, default=Workload.seconds, metavar="S")
    parser.add_argument(
        "--leave", type=float, default=Workload.leave, metavar="X", help="share who go away early"
    )
    parser.add_argument("--bad", type=float, default=Workload.bad, metavar="X", help="share of bad requests")
    parser.add_argument("--max-tokens", type=int, default=Workload.max_tokens, metavar="N")
    parser.add_argument("--seed", type=int, default=Workload.seed, metavar="N")
    parser.add_argument(
        "--api-key", default=os.environ.get("TIERAX_API_KEY"), metavar="KEY", help="or in TIERAX_API_KEY"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is the standard output")
    args = parser.parse_args(argv)
    workload = Workload(
        clients=args.clients,
        seconds=args.seconds,
        leave=args.leave,
        bad=args.bad,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    if workload.clients < 1 or workload.seconds <= 0 or workload.max_tokens < 1:
        parser.error("--clients, --seconds and --max-tokens must be more than 0")
    if min(workload.leave, workload.bad) < 0 or workload.leave + workload.bad > 1:
        parser.error("--leave and --bad are shares of the calls, together at most 1")
    try:
        report = asyncio.run(drive(args.url, workload, args.api_key))
    except (ClientError, OSError, KeyError, ValueError) as error:
        parser.exit(1, f"tierax bench load: {args.url}: {type(error).__name__}: {error}\n")
    if args.json is not None:
        write_report(asdict(report), args.json)
    else:
        print(_table(report))
    for problem in report.problems:
        print(problem, file=sys.stderr)
    return 1 if report.problems else 0


async def drive(url: str, workload: Workload, api_key: str | None = None) -> Report:
    """`run` over a session of its own."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = ClientTimeout(total=None, sock_read=120)
    # No connection outlives its call, so that none is among the descriptors that are counted afterwards.
    connector = TCPConnector(limit=0, force_close=True)
    async with ClientSession(timeout=timeout, connector=connector) as session:
        return await run(Server(session, url.rstrip("/"), headers), workload)


def _table(report: Report) -> str:
    rss, fds, tasks = report.rss_mib, report.open_fds, report.tasks
    rows = [
        ["requests/s", number(report.requests_s)],
        ["finished, left, refused", f"{report.finished}, {report.left}, {report.refused}"],
        ["output tokens/s", number(report.output_tok_s)],
        [
            "time to first token, p50 and p99, ms",
            f"{number(report.ttft_ms_p50)}, {number(report.ttft_ms_p99)}",
        ],
        ["event loop's lag, p99, ms", f"<= {number(report.loop_lag_ms_p99)}"],
        ["resident memory, MiB: before, a quarter in, after", ", ".join(map(number, rss))],
        ["file descriptors before and after", f"{fds[0]:g}, {fds[1]:g}"],
        ["tasks before and after", f"{tasks[0]:g}, {tasks[1]:g}"],
        ["pages in use after", f"{report.pages_in_use:g}"],
        ["answers that differ from a near tie on", str(report.ties)],
    ]
    return table([f"{report.seconds:.0f} s", "value"], rows)


if __name__ == "__main__":
    sys.exit(main())
