"""The sections of `tierax bench report`: what each measures, and how it shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..lab.prices import Prices
from . import agents, pictures
from .agents import Agents
from .cache_engine import EngineMaker, PageSize
from .cache_table import Row, converse, measure_table, summarize
from .cache_ttft import measure_ttft
from .online import measure as measure_online
from .online_client import Server, ServerError
from .peers.peer import PeerMissing
from .peers.servers import PeerServer
from .report import number
from .talks import WORKLOADS, Workload

ARTICLE = agents.Workload(
    conversations=12,
    running=4,
    systems=3,
    system_tokens=2048,
    first_tokens=384,
    device_tokens=13_312,
    uncached=(4, 8),
)
"""As the workload of `tierax bench cache`, and a third of its work."""
SIZES = (0.5, 1.0, 1.5, 2.0, 3.0)
"""Device caches, in multiples of the workload's small one."""
PLACES = {
    "cold": "computed",
    "device": "device",
    "host": "host",
    "disk_warm": "disk, files in memory",
    "disk": "disk",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What every section is given."""

    maker: EngineMaker
    page: PageSize
    workload: agents.Workload
    first_token: int
    """Tokens of the prompts of `tiers`."""
    repeats: int
    sizes: tuple[float, ...]
    online: Workload
    peers: Mapping[str, str]
    """Name -> an interpreter that has it."""
    runs: int


@dataclass(frozen=True, slots=True)
class Section:
    """`measure` gives figures; `show` a text in Markdown, with pictures in the folder that it is given."""

    title: str
    measure: Callable[[Plan, Mapping[str, Any]], dict[str, Any]]
    """The second argument has the figures of the sections before."""
    show: Callable[[dict[str, Any], Path], str]


def _article(plan: Plan, _: Mapping[str, Any]) -> dict[str, Any]:
    found = measure_table(plan.maker, plan.workload, plan.page)
    return {name: found[name] for name in ("configs", "infinite_hit_rate", "usd_formula")}


def _show_article(figures: dict[str, Any], folder: Path) -> str:
    rows = [
        [
            row["name"],
            *(number(row[key]) for key in ("ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms", "req_s")),
            f"{row['device_kv_bytes'] / 1e6:.0f}",
            f"{row['hit_rate']:.1%}",
            number(row["usd_per_mtok"]),
        ]
        for row in figures["configs"]
    ]
    header = ["cache", "TTFT ms", "p50", "p99", "TPOT ms", "req/s", "device KV MB", "hit rate", "$/M tokens"]
    times = {row["name"]: row["ttft_ms_mean"] for row in figures["configs"]}
    pictures.bars(times, folder / "article.svg", "ms, mean", "Time to the first token")
    note = (
        "Agents that talk in turn behind a few long system prompts. `DEVICE`, `HOST` and `DISK` have the same small device cache; `none` "
        f"shares nothing, `DEVICE-ALL` holds everything. An infinite cache would hit {figures['infinite_hit_rate']:.1%}."
    )
    return f"{note}\n\n{_markdown(header, rows)}\n\n![Time to the first token]({folder.name}/article.svg)"


def _tiers(plan: Plan, _: Mapping[str, Any]) -> dict[str, Any]:
    return measure_ttft(plan.maker, plan.page, tokens=plan.first_token, repeats=plan.repeats)


def _show_tiers(figures: dict[str, Any], folder: Path) -> str:
    cold = figures["ttft_ms"]["cold"]
    rows = [
        [label, number(figures["ttft_ms"][place]), f"{figures['ttft_ms'][place] / cold:.1%}"]
        for place, label in PLACES.items()
    ]
    lines = {label: figures["ttft"]["all_ms"][place] for place, label in PLACES.items()}
    pictures.cumulative(
        lines, folder / "tiers.svg", "ms", "Time to the first token, by the place of the prompt's KV"
    )
    note = f"One prompt of {figures['ttft']['tokens']} tokens at a time, on an idle engine: where its KV was found, and the median time to the first token."
    table = _markdown(["found", "TTFT ms", "of computing"], rows)
    return f"{note}\n\n{table}\n\n![Distributions of the time to the first token]({folder.name}/tiers.svg)"


def _sizes(plan: Plan, _: Mapping[str, Any]) -> dict[str, Any]:
    """The workload on device caches of several sizes, alone and with a host tier beside the device."""
    workload, page = plan.workload, plan.page
    longest = workload.longest + page.tokens
    rows = []
    for factor in plan.sizes:
        tokens = max(round(factor * workload.device_tokens), longest)
        host = page.pool_bytes(2 * workload.device_tokens)
        for row in (Row("device", tokens, {}), Row("device and host", tokens, {}, host)):
            options: dict[str, Any] = {
                "device_cache_size": page.pool_bytes(tokens),
                "host_cache_size": row.host_bytes,
            }
            with plan.maker.open(**options) as driver:
                clients = Agents(workload, page.vocab_size)
                served, seconds = converse(driver, clients, workload, plan.maker.clock)
                driver.settle()
            figures = summarize(row, served, seconds, page, workload.system_tokens, 0, Prices())
            rows.append({"device_tokens": tokens} | figures)
    return {"rows": rows}


def _show_sizes(figures: dict[str, Any], folder: Path) -> str:
    rows = [
        [
            row["name"],
            f"{row['device_tokens']:,}",
            number(row["req_s"]),
            number(row["ttft_ms_mean"]),
            f"{row['hit_rate']:.1%}",
        ]
        for row in figures["rows"]
    ]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in figures["rows"]:
        lines.setdefault(row["name"], []).append((row["device_tokens"], row["req_s"]))
    title = "Throughput by the size of the device cache"
    pictures.curve(lines, folder / "sizes.svg", "tokens that the device cache holds", "requests/s", title)
    table = _markdown(["tiers", "device tokens", "req/s", "TTFT ms", "hit rate"], rows)
    return f"The same conversations; the host tier holds twice the small device cache.\n\n{table}\n\n![{title}]({folder.name}/sizes.svg)"


def _prices(_: Plan, before: Mapping[str, Any]) -> dict[str, Any]:
    article = before["article"]
    return {
        "usd_per_mtok": {row["name"]: row["usd_per_mtok"] for row in article["configs"]},
        "usd_formula": article["usd_formula"],
    }


def _show_prices(figures: dict[str, Any], folder: Path) -> str:
    dollars = figures["usd_per_mtok"]
    base = dollars["none"]
    rows = [[name, number(value), number(100 * value / base)] for name, value in dollars.items()]
    pictures.bars(dollars, folder / "prices.svg", "$ per million tokens", "Cost of the conversations above")
    table = _markdown(["cache", "$/M tokens", "relative"], rows)
    note = f"If this machine were rented at the price of the formula: {figures['usd_formula']}. Read the last column: the first depends on the price."
    return f"{note}\n\n{table}\n\n![Cost per million tokens]({folder.name}/prices.svg)"


def _peers(plan: Plan, _: Mapping[str, Any]) -> dict[str, Any]:
    """Each server in turn, ours first, with nothing else of ours running meanwhile."""
    servers: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, python in {"tierax": sys.executable, **plan.peers}.items():
        try:
            with PeerServer(name, plan.maker.model, python, plan.online.running) as server:
                servers[name] = measure_online(
                    Server(server.url, server.model), "rag", plan.online, plan.runs
                )
        except (PeerMissing, ServerError, OSError) as error:
            missing[name] = str(error) or type(error).__name__
    return {"servers": servers, "missing": missing}


def _show_peers(figures: dict[str, Any], folder: Path) -> str:
    def times(spread: dict[str, float] | None) -> str:
        return "-" if spread is None else f"{number(spread['p50'])} ({number(spread['p99'])})"

    rows = [
        [
            name,
            times(found["ttft_first_ms"]),
            times(found["ttft_later_ms"]),
            times(found["tpot_ms"]),
            number(found["req_s"]),
            number(found["output_tok_s"]),
        ]
        for name, found in figures["servers"].items()
    ]
    lines = {
        f"{name}, {kind} turns": found["ttft_ms"][kind]
        for name, found in figures["servers"].items()
        for kind in ("first", "later")
        if found["ttft_ms"][kind]
    }
    pictures.cumulative(lines, folder / "peers.svg", "ms", "Time to the first token")
    header = ["server", "TTFT first ms: p50 (p99)", "TTFT later", "TPOT", "req/s", "output tok/s"]
    notes = [f"- {name}: {reason}" for name, reason in figures["missing"].items()]
    note = (
        "Questions about a few documents over HTTP, by the same client: `tierax bench online --workload rag`. `llama-server` reads the GGUF file as it is, "
        "the others have float32 weights; `transformers`, and `llama-server` out of `llama_cpp`, answer one request at a time."
    )
    return "\n\n".join(
        [
            note,
            _markdown(header, rows),
            f"![Time to the first token]({folder.name}/peers.svg)",
            *(["\n".join(notes)] if notes else []),
        ]
    )


SECTIONS = {
    "article": Section("The source article's table", _article, _show_article),
    "tiers": Section("First tokens by tier", _tiers, _show_tiers),
    "sizes": Section("Throughput against the size of the device cache", _sizes, _show_sizes),
    "prices": Section("Cost per million tokens", _prices, _show_prices),
    "peers": Section("Other engines side by side", _peers, _show_peers),
}
"""By the names that `--only` takes, in the order of the page. `prices` needs the figures of `article`."""


def quick(workload: agents.Workload) -> agents.Workload:
    """The same with a few short conversations."""
    return replace(
        workload,
        conversations=4,
        running=2,
        systems=2,
        system_tokens=128,
        first_tokens=32,
        user_tokens=8,
        answer_tokens=8,
        most_turns=3,
        mean_turns=2.0,
        device_tokens=512,
        uncached=(0, 4),
    )


QUICK_ONLINE = replace(WORKLOADS["rag"].scaled(0.02), conversations=4, running=2, systems=2)


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
