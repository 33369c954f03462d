"""The sections of `tierax bench report`: what each measures, and how it shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..lab.prices import Prices
from . import agents, pictures
from .agents import Agents
from .cache_table import Row, converse, measure_table, summarize, table_targets
from .cache_ttft import measure_ttft
from .report import number
from .section import Plan, Section, markdown, times
from .section_peers import PEERS_SECTION, TALKS
from .section_speed import SPEED

ARTICLE = agents.Workload(
    conversations=12,
    running=4,
    systems=3,
    system_tokens=2048,
    first_tokens=384,
    device_tokens=10_560,
    uncached=(4, 8),
)
"""As the workload of `tierax bench cache`, and a third of its work; its device cache, too, is 1.2 times what runs at once."""
SIZES = (0.5, 1.0, 1.5, 2.0, 3.0)
"""Device caches, in multiples of the workload's small one."""
PLACES = {
    "cold": "computed",
    "device": "device",
    "host": "host",
    "disk_warm": "disk, files in memory",
    "disk": "disk",
}


def _article(plan: Plan, _: Mapping[str, Any]) -> dict[str, Any]:
    found = measure_table(plan.maker, plan.workload, plan.page)
    different = len(found["answers"]["different"])
    return {
        **{name: found[name] for name in ("configs", "infinite_hit_rate", "usd_formula")},
        "targets": [target.as_json() for target in table_targets(found)],
        "answers_that_differ": different,
        "workload": {"conversations": plan.workload.conversations, "running": plan.workload.running},
        "schedule_policy": plan.maker.options.get("schedule_policy", "fcfs"),
    }


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
    pictures.save(folder / "article.svg", pictures.bars(times, "ms, mean", "Time to the first token"))
    workload = figures["workload"]
    note = (
        f"{workload['conversations']} agents that talk in turn behind a few long system prompts, at most {workload['running']} at once, those whose prefix is cached first "
        f"(`--schedule-policy {figures['schedule_policy']}`). `DEVICE`, `HOST` and `DISK` have the same small device cache; `none` "
        f"shares nothing, `DEVICE-ALL` holds everything. An infinite cache would hit {figures['infinite_hit_rate']:.1%}."
    )
    targets = [
        [t["name"], _value(t["value"], t["percent"]), f"{t['sense']} {_value(t['limit'], t['percent'])}"]
        for t in figures["targets"]
    ]
    picture = f"![Time to the first token]({folder.name}/article.svg)"
    answers = (
        f"Answers that differ between the rows by more than a near tie: {figures['answers_that_differ']}."
    )
    return "\n\n".join(
        [note, markdown(header, rows), picture, markdown(["aim", "found", "wanted"], targets), answers]
    )


def _value(value: float, percent: bool) -> str:
    return f"{value:.1%}" if percent else f"{value:.3f}"


def _brief_article(figures: dict[str, Any]) -> list[tuple[str, str]]:
    rows = {row["name"]: row for row in figures["configs"]}
    disk, count = rows["DISK"], figures["workload"]["conversations"]
    found = []
    others = {"none": "no cache", "DEVICE": "the same device cache alone", "DEVICE-ALL": "all on the device"}
    for name, label in others.items():
        what = f"{count} agents, three tiers against {label}"
        ttft = disk["ttft_ms_mean"] / rows[name]["ttft_ms_mean"]
        found += [(f"{what}: time to the first token", times(ttft))]
        found += [(f"{what}: requests/s", times(disk["req_s"] / rows[name]["req_s"]))]
    return found


def _tiers(plan: Plan, _: Mapping[str, Any]) -> dict[str, Any]:
    return measure_ttft(plan.maker, plan.page, tokens=plan.first_token, repeats=plan.repeats)


def _show_tiers(figures: dict[str, Any], folder: Path) -> str:
    cold = figures["ttft_ms"]["cold"]
    rows = [
        [label, number(figures["ttft_ms"][place]), f"{figures['ttft_ms'][place] / cold:.1%}"]
        for place, label in PLACES.items()
    ]
    lines = {label: figures["ttft"]["all_ms"][place] for place, label in PLACES.items()}
    title = "Time to the first token, by the place of the prompt's KV"
    pictures.save(folder / "tiers.svg", pictures.cumulative(lines, "ms", title))
    note = f"One prompt of {figures['ttft']['tokens']} tokens at a time, on an idle engine: where its KV was found, and the median time to the first token."
    table = markdown(["found", "TTFT ms", "of computing"], rows)
    return f"{note}\n\n{table}\n\n![Distributions of the time to the first token]({folder.name}/tiers.svg)"


def _brief_tiers(figures: dict[str, Any]) -> list[tuple[str, str]]:
    times, tokens = figures["ttft_ms"], figures["ttft"]["tokens"]
    return [
        (
            f"a prompt of {tokens:,} tokens again, {label}: first token, of computing it",
            f"{times[place] / times['cold']:.1%}",
        )
        for place, label in PLACES.items()
        if place in ("device", "host", "disk")
    ]


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
    panel = pictures.curve(lines, "tokens that the device cache holds", "requests/s", title)
    pictures.save(folder / "sizes.svg", panel)
    table = markdown(["tiers", "device tokens", "req/s", "TTFT ms", "hit rate"], rows)
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
    panel = pictures.bars(dollars, "$ per million tokens", "Cost of the conversations above")
    pictures.save(folder / "prices.svg", panel)
    table = markdown(["cache", "$/M tokens", "relative"], rows)
    note = f"If this machine were rented at the price of the formula: {figures['usd_formula']}. Read the last column: the first depends on the price."
    return f"{note}\n\n{table}\n\n![Cost per million tokens]({folder.name}/prices.svg)"


SECTIONS = {
    "speed": SPEED,
    "article": Section("The source article's table", _article, _show_article, _brief_article),
    "tiers": Section("First tokens by tier", _tiers, _show_tiers, _brief_tiers),
    "sizes": Section("Throughput against the size of the device cache", _sizes, _show_sizes),
    "prices": Section("Cost per million tokens", _prices, _show_prices),
    "peers": PEERS_SECTION,
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


QUICK_TALKS = replace(TALKS.scaled(0.05), conversations=4, running=2, systems=2, answer_tokens=4)
"""For a look at the page."""
