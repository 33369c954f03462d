"""The section `speed`: decode and prefill of one engine without a server, beside the memory bound and other engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import offline, pictures
from .report import number
from .section import Plan, Section, markdown, times

SAME = {"llama-server": "llama.cpp-f32", "transformers": "transformers"}
"""Name of a server -> the same engine without one, with weights as wide as ours."""


def _measure(plan: Plan, _: Mapping[str, Any]) -> dict[str, Any]:
    def say(stage: str) -> None:
        print(f"measuring: {stage}", file=sys.stderr, flush=True)

    found = offline.measure(plan.maker.model, dict(plan.limits), plan.shapes, plan.maker.clock, say)
    peers = [(SAME[name], python) for name, python in plan.peers.items() if name in SAME]
    found["peers"], found["missing"] = offline.measure_peers(found, peers)
    # The page says of every section in the same way what it ran on.
    found["bounds"] = found.pop("machine")
    return found


def _show(figures: dict[str, Any], folder: Path) -> str:
    peers = figures["peers"]
    header = ["", "tierax, tok/s", "least", "most", "bound", "of it"]
    header += [column for name in peers for column in (f"{name}, tok/s", "tierax is")]
    rows = []
    for label, row, theirs in _shapes(figures):
        cells = [label, *(number(row[key]) for key in ("tok_s", "tok_s_min", "tok_s_max", "bound_tok_s"))]
        cells.append(f"{row['tok_s'] / row['bound_tok_s']:.0%}")
        for value in theirs.values():
            cells += ["-", "-"] if value is None else [number(value), f"{row['tok_s'] / value:.2f}x"]
        rows.append(cells)
    context = figures["decode"][-1]["context"]
    title = f"Decode at a context of {context}"
    pictures.save(folder / "speed.svg", offline.decode_panel(figures, context))
    bounds, bare, start = figures["bounds"], figures["bare_step"], figures["start"]
    notes = [
        f"Medians of {figures['repeats']}, in one process, without a server. The bound is what the machine reads from memory "
        f"({number(bounds['read_gb_s'])} GB/s) or multiplies ({number(bounds['matmul_gflop_s'])} GFLOP/s in f32).",
        f"The engine's loop runs {bare['batch']} requests at {bare['ratio']:.0%} of the speed of the bare step. Loading took {number(start['load_s'])} s, "
        f"preparing {start['step_programs']} step programs {number(start['warm_up_s'])} s ({start['compiled']} of them compiled anew).",
        *(f"- {name}: {reason}" for name, reason in figures["missing"].items()),
    ]
    return "\n\n".join([notes[0], markdown(header, rows), f"![{title}]({folder.name}/speed.svg)", *notes[1:]])


def _brief(figures: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"{label}: tokens/s against {name} (weights in f32)", times(row["tok_s"] / value))
        for name in figures["peers"]
        if name.startswith("llama")
        for label, row, theirs in _shapes(figures)
        if (value := theirs[name]) is not None
    ]


def _shapes(figures: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, float | None]]]:
    """What was measured, our figures, and each peer's speed at the same."""
    found = []
    for kind in ("decode", "prefill"):
        for row in figures[kind]:
            label = (
                f"decode, {row['batch']} running, context {row['context']}"
                if kind == "decode"
                else f"prefill of {row['tokens']} tokens"
            )
            same = {name: _same(peer, kind, row) for name, peer in figures["peers"].items()}
            found.append((label, row, {n: None if row is None else row["tok_s"] for n, row in same.items()}))
    return found


def _same(peer: dict[str, Any], kind: str, ours: dict[str, Any]) -> dict[str, Any] | None:
    keys = {"batch", "context", "tokens"} & ours.keys()
    return next((row for row in peer[kind] if all(row[key] == ours[key] for key in keys)), None)


SPEED = Section("Decode and prefill", _measure, _show, _brief)
