"""The section `peers`: servers of several engines under the same conversations, with too little device memory for all of them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from . import pictures
from .online import measure as measure_online
from .online_client import Server, ServerError
from .peers.peer import PeerMissing
from .peers.servers import PeerServer
from .report import number
from .section import Plan, Section, markdown, times
from .talks import Workload

TALKS = Workload(
    conversations=15,
    running=3,
    turns=3,
    systems=5,
    system_words=1024,
    first_words=192,
    user_words=48,
    answer_tokens=24,
)
"""Conversations that come again after all others have had their turn, behind a few long system prompts."""
OURS, SMALL = "tierax DISK", "tierax DEVICE"


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    kind: str
    """Name of the server's command."""
    python: str
    flags: Sequence[str] = ()


def device_tokens(talks: Workload) -> int:
    """A device cache of 1.2 times what runs at once, for a tokenizer that has the words whole."""
    longest = talks.system_words + talks.first_words
    longest += round(talks.turns) * (talks.user_words + talks.answer_tokens)
    return round(1.2 * talks.running * longest)


def _measure(plan: Plan, _: Mapping[str, Any]) -> dict[str, Any]:
    """Each server in turn, ours first, with nothing else of ours running meanwhile."""
    tokens = device_tokens(plan.talks)
    kv_bytes = plan.page.pool_bytes(tokens)
    servers: dict[str, Any] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="tierax-bench-") as disk:
        tiers = ("--host-cache-size", str(kv_bytes), "--host-disk-cache-dir", disk)
        rows = [
            _Row(OURS, "tierax", sys.executable, tiers),
            _Row(SMALL, "tierax", sys.executable, ("--host-cache-size", "0")),
            *(_Row(name, name, python) for name, python in plan.peers.items()),
        ]
        for row in rows:
            print(f"measuring: {row.label}", file=sys.stderr, flush=True)
            try:
                with PeerServer(
                    row.kind, plan.maker.model, row.python, plan.talks.running, row.flags, kv_bytes
                ) as server:
                    found = measure_online(
                        Server(server.url, server.model), "multiturn", plan.talks, plan.runs
                    )
                # All serve the same model; what some call it is where its file lies.
                servers[row.label] = {key: value for key, value in found.items() if key != "model"}
            except (PeerMissing, ServerError, ClientError, OSError) as error:
                missing[row.label] = str(error) or type(error).__name__
    return {
        "servers": servers,
        "missing": missing,
        "device_tokens": tokens,
        "device_bytes": kv_bytes,
        "talks": {"conversations": plan.talks.conversations, "running": plan.talks.running},
    }


def _show(figures: dict[str, Any], folder: Path) -> str:
    ours = figures["servers"].get(OURS)
    rows = []
    for name, found in figures["servers"].items():
        rows.append(
            [
                name,
                _spread(found["ttft_first_ms"]),
                _spread(found["ttft_later_ms"]),
                _spread(found["tpot_ms"]),
                number(found["req_s"]),
                number(found["output_tok_s"]),
                "not told" if found["cached_share"] is None else f"{found['cached_share']:.1%}",
                *(("-", "-") if name == OURS else _against(ours, found)),
            ]
        )
    lines = {
        f"{name}, {kind} turns": found["ttft_ms"][kind]
        for name, found in figures["servers"].items()
        for kind in ("first", "later")
        if found["ttft_ms"][kind]
    }
    if lines:
        pictures.save(folder / "peers.svg", pictures.cumulative(lines, "ms", "Time to the first token"))
    header = ["server", "TTFT first ms: p50 (p99)", "TTFT later", "TPOT", "req/s", "output tok/s", "cached"]
    header += [f"{OURS}: later TTFT", "req/s"]
    talks = figures["talks"]
    note = (
        f"{talks['conversations']} conversations over HTTP by the same client, {talks['running']} requests at once, behind long system prompts. Each "
        f"conversation goes on when all others have had their turn. The device cache of tierax and of vLLM holds {figures['device_tokens']:,} tokens "
        f"({figures['device_bytes'] / 1e6:.0f} MB), 1.2 times what runs at once; `{OURS}` has as much host memory, and a directory. `llama-server` reads the GGUF file as it "
        "is, the others have weights in float32; `transformers`, and `llama-server` out of `llama_cpp`, answer one request at a time. The last "
        f"two columns say what `{OURS}` is to the row: its median time to the first token of later turns, its requests per second."
    )
    notes = [f"- {name}: {reason}" for name, reason in figures["missing"].items()]
    picture = [f"![Time to the first token]({folder.name}/peers.svg)"] if lines else []
    return "\n\n".join([note, markdown(header, rows), *picture, *(["\n".join(notes)] if notes else [])])


def _brief(figures: dict[str, Any]) -> list[tuple[str, str]]:
    ours = figures["servers"].get(OURS)
    found = []
    for name, peer in figures["servers"].items():
        if name != OURS:
            ttft, rate = _against(ours, peer)
            what = f"servers under conversations, three tiers against {name}"
            found += [(f"{what}: TTFT of later turns", ttft), (f"{what}: requests/s", rate)]
    return [(what, value) for what, value in found if value != "-"]


def _against(ours: dict[str, Any] | None, other: dict[str, Any]) -> tuple[str, str]:
    """Our later TTFT and requests per second, as multiples of another's."""
    if ours is None or ours["ttft_later_ms"] is None or other["ttft_later_ms"] is None:
        return "-", "-"
    ttft = ours["ttft_later_ms"]["p50"] / other["ttft_later_ms"]["p50"]
    return times(ttft), times(ours["req_s"] / other["req_s"])


def _spread(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{number(spread['p50'])} ({number(spread['p99'])})"


PEERS_SECTION = Section("Other engines side by side", _measure, _show, _brief)
