"""One workload of agents on five caches, each row in a fresh engine: what do the tiers bring, and at which price?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..engine.request import Request
from ..lab.prices import Prices
from .agents import Agents, Conversation, Ideal, Workload, ideal_cache
from .bounds import Clock
from .cache_engine import Driver, EngineMaker, PageSize
from .raw_io import bytes_below
from .targets import Target

TIERS = ("device", "host", "disk")
NEAR_TIE = 1e-3
"""Log-probs of the two likeliest tokens that lie closer may change places with the rounding of another batch."""


@dataclass(frozen=True, slots=True)
class Row:
    """One cache."""

    name: str
    device_tokens: int
    options: dict[str, Any]
    host_bytes: int = 0
    disk: bool = False
    part: tuple[int, int] | None = None
    """The conversations that it runs; None: all."""


def make_rows(workload: Workload, page: PageSize, ideal: Ideal) -> list[Row]:
    """From no cache to one that holds everything on the device; the rows between share one small device tier."""
    small = workload.device_tokens
    # Beside all that can be kept: the page that each running answer is about to begin, and the next.
    everything = (ideal.pages + 2 * workload.running) * page.tokens
    host = page.pool_bytes(small) - page.bytes
    return [
        Row("none", everything, {"disable_radix_cache": True}, part=workload.uncached),
        Row("DEVICE", small, {}),
        # A host tier of the device's size would only mirror it, if it were given everything at once.
        Row("HOST", small, {"write_policy": "write_back"}, host),
        Row("DISK", small, {}, host, disk=True),
        Row("DEVICE-ALL", everything, {}),
    ]


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request, times in seconds."""

    prompt_tokens: int
    output_tokens: int
    cached: dict[str, int]
    """Prompt tokens by the tier in which they were found."""
    ttft: float
    tpot: float

    @classmethod
    def of(cls, request: Request) -> Served:
        assert request.first_token is not None
        assert request.finished_at is not None
        return cls(
            request.num_prompt,
            request.num_output,
            dict(request.cached_by_tier),
            request.first_token - request.arrival,
            (request.finished_at - request.first_token) / max(1, request.num_output - 1),
        )

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which two rows' answers in a conversation part."""

    row: str
    conversation: int
    turn: int
    position: int
    gap: float
    """Between the log-probs of the two likeliest tokens there."""

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


def measure_table(
    maker: EngineMaker,
    workload: Workload,
    page: PageSize,
    *,
    disk_parent: Path | None = None,
    prices: Prices | None = None,
    done: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """All rows, one after the other, of each of which `done` hears; `configs`, `infinite_hit_rate`, `answers` and what they were measured with."""
    plan = ideal_cache(_planned(workload, page.vocab_size), page.tokens, workload.system_tokens)
    configs: list[dict[str, Any]] = []
    reference: dict[int, Conversation] = {}
    differences: list[Difference] = []
    for row in make_rows(workload, page, plan):
        agents = Agents(workload, page.vocab_size, row.part)
        with tempfile.TemporaryDirectory(prefix="tierax-bench-", dir=disk_parent) as directory:
            options = row.options | {
                "device_cache_size": page.pool_bytes(row.device_tokens),
                "host_cache_size": row.host_bytes,
                "host_disk_cache_dir": directory if row.disk else None,
            }
            with maker.open(**options) as driver:
                served, seconds = converse(driver, agents, workload, maker.clock, row.name, maker.progress)
                driver.settle()
                disk_bytes = bytes_below(Path(directory))
                differences += compare_answers(row.name, reference, agents.conversations, driver.top_two_gap)
        reference |= {c.index: c for c in agents.conversations if c.index not in reference}
        configs.append(
            summarize(row, served, seconds, page, workload.system_tokens, disk_bytes, prices or Prices())
        )
        done(configs[-1])
    ideal = ideal_cache(reference.values(), page.tokens, workload.system_tokens)
    return {
        "configs": configs,
        "infinite_hit_rate": ideal.hit_rate,
        "infinite_hit_rate_own": ideal.hit_rate_own,
        "answers": {
            "near_ties": [_as_json(d) for d in differences if d.near_tie],
            "different": [_as_json(d) for d in differences if not d.near_tie],
        },
        "usd_formula": (prices or Prices()).formula,
    }


def converse(
    driver: Driver, agents: Agents, workload: Workload, clock: Clock, name: str = "", progress: bool = False
) -> tuple[list[Served], float]:
    """Runs all conversations to their ends, with a full house as long as there is one. Returns the seconds too."""
    served: list[Served] = []
    live: dict[Request, Conversation] = {}
    started = clock()
    with tqdm(total=agents.num_requests, desc=name, unit="request", disable=not progress) as bar:
        while True:
            while (conversation := agents.next()) is not None:
                live[driver.send(conversation.prompt(), workload.answer_tokens)] = conversation
            if not live:
                return served, clock() - started
            driver.turn()
            for request in [r for r in live if r.finished_at is not None]:
                driver.finish([request])
                agents.answered(live.pop(request), request.tokens[request.num_prompt :])
                served.append(Served.of(request))
                bar.update()


def summarize(
    row: Row,
    served: Sequence[Served],
    seconds: float,
    page: PageSize,
    system_tokens: int,
    disk_bytes: int,
    prices: Prices,
) -> dict[str, Any]:
    """A row's figures by their names in the JSON report; times in milliseconds."""
    ttft = 1e3 * np.array([s.ttft for s in served])
    prompted = sum(s.prompt_tokens for s in served)
    own = sum(s.prompt_tokens - system_tokens for s in served)
    tokens = prompted + sum(s.output_tokens for s in served)
    return {
        "name": row.name,
        "ttft_ms_mean": float(ttft.mean()),
        "ttft_ms_p50": float(np.percentile(ttft, 50)),
        "ttft_ms_p99": float(np.percentile(ttft, 99)),
        "ttft_ms_stddev": float(ttft.std()),
        "tpot_ms": 1e3 * sum(s.tpot for s in served) / len(served),
        "req_s": len(served) / seconds,
        "seconds": seconds,
        "requests": len(served),
        "prompt_tokens_mean": prompted / len(served),
        "device_kv_bytes": page.pool_bytes(row.device_tokens),
        "host_kv_bytes": row.host_bytes,
        "disk_bytes": disk_bytes,
        "hit_rate": sum(s.cached_tokens for s in served) / prompted,
        "hit_rate_by_tier": {t: sum(s.cached.get(t, 0) for s in served) / prompted for t in TIERS},
        "hit_rate_own": sum(max(0, s.cached_tokens - system_tokens) for s in served) / own,
        "usd_per_mtok": prices.per_million_tokens(
            seconds=seconds, tokens=tokens, dram_bytes=row.host_bytes, ssd_bytes=disk_bytes
        ),
    }


def compare_answers(
    row: str,
    reference: Mapping[int, Conversation],
    conversations: Iterable[Conversation],
    gap: Callable[[list[int]], float],
) -> list[Difference]:
    """Where each conversation first leaves the one of the same index in `reference`, if there is one. `gap` measures how
    near a tie the next token of a prompt is.

    What follows a difference has another history, and says nothing.
    """
    found = []
    for ours in conversations:
        answers = reference[ours.index].answers if ours.index in reference else ours.answers
        for turn, (mine, answer) in enumerate(zip(ours.answers, answers, strict=True)):
            position = next((i for i, (a, b) in enumerate(zip(mine, answer, strict=True)) if a != b), None)
            if position is not None:
                prompt = [*ours.prompts()[turn], *mine[:position]]
                found.append(Difference(row, ours.index, turn, position, gap(prompt)))
                break
    return found


def table_targets(report: dict[str, Any]) -> list[Target]:
    """What the row DISK should reach, by itself and against the others."""
    rows = {row["name"]: row for row in report["configs"]}
    disk, none, device, everything = (rows[n] for n in ("DISK", "none", "DEVICE", "DEVICE-ALL"))

    def ratio(key: str, other: dict[str, Any]) -> float:
        return disk[key] / other[key]

    return [
        Target("DISK: hit rate", disk["hit_rate"], ">=", 0.873, percent=True),
        Target(
            "DISK: hit rate, against an infinite cache",
            disk["hit_rate"],
            ">=",
            report["infinite_hit_rate"] - 0.01,
            percent=True,
        ),
        Target("DISK / none: TTFT", ratio("ttft_ms_mean", none), "<=", 0.20),
        Target("DISK / none: requests/s", ratio("req_s", none), ">=", 3.8),
        Target("DISK / DEVICE: requests/s", ratio("req_s", device), ">=", 1.28),
        Target("DISK / DEVICE: TTFT", ratio("ttft_ms_mean", device), "<=", 0.6),
        Target("DISK / DEVICE-ALL: requests/s", ratio("req_s", everything), ">=", 0.9),
        Target("DISK / DEVICE-ALL: device KV bytes", ratio("device_kv_bytes", everything), "<=", 0.6),
    ]


def _planned(workload: Workload, vocab_size: int) -> list[Conversation]:
    """The conversations with stand-ins for answers: enough to count pages, as no two messages are alike."""
    conversations = Agents(workload, vocab_size).conversations
    for conversation in conversations:
        while not conversation.finished:
            conversation.hear([0] * workload.answer_tokens)
    return conversations


def _as_json(difference: Difference) -> dict[str, Any]:
    return {
        "config": difference.row,
        "conversation": difference.conversation,
        "turn": difference.turn,
        "position": difference.position,
        "gap": difference.gap,
    }
