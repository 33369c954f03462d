"""Pictures of what a sweep or a run found. matplotlib is loaded here, and nowhere before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import LabError

Row = dict[str, Any]
GIB = 1 << 30
MOST_BARS = 24


def plot_all(rows: Sequence[Row], folder: Path, suffix: str = "png") -> list[Path]:
    """Every picture that the rows have figures for; returns the files. Raises `LabError` without matplotlib, or for rows
    of which there is nothing to draw.
    """
    try:
        import matplotlib as mpl
        import matplotlib.pyplot as plt
    except ImportError:
        raise LabError("pictures need matplotlib: pip install 'tierax[lab]'") from None
    pictures = {
        "hit-rate": (_hit_rates, [row for row in rows if "token_hit_rate" in row]),
        "gap-closed": (_gaps, [row for row in rows if _has_gap(row)]),
        "first-token": (_first_tokens, [row for row in rows if "ttft_ms_percentiles" in row]),
        "cost": (_costs, [row for row in rows if "usd_parts" in row]),
        "timeline": (_timeline, [row for row in rows if row.get("timeline")][:1]),
    }
    written: list[Path] = []
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"backend": "agg", "figure.figsize": (8, 4.8), "font.size": 10, "axes.grid": True}):
        for name, (draw, found) in pictures.items():
            if found:
                figure, axes = plt.subplots(layout="constrained")
                draw(axes, found)
                written.append(folder / f"{name}.{suffix}")
                figure.savefig(written[-1], dpi=120)
                plt.close(figure)
    if not written:
        raise LabError(
            "there is nothing in this report that could be drawn; give one of `lab sweep` or `lab run`"
        )
    return written


def _hit_rates(axes: Any, rows: Sequence[Row]) -> None:
    for name, points in _by_policy(rows, "token_hit_rate").items():
        style = {"color": "black", "linestyle": "--"} if name == "belady" else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    for row in rows:
        if row["policy"] == "infinite":
            axes.axhline(100 * row["token_hit_rate"], color="gray", linestyle=":", label="infinite")
    axes.set(xscale="log", xlabel="capacity, blocks", ylabel="prompt tokens hit, %", ylim=(0, None))
    axes.set_title(f"{rows[0]['trace']}: hit rate by capacity")
    axes.legend(loc="lower right")


def _gaps(axes: Any, rows: Sequence[Row]) -> None:
    for name, points in _by_policy(rows, "gap_closed").items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(0, color="gray", linestyle=":")
    lowest = min(100 * row["gap_closed"] for row in rows)
    axes.set(xscale="log", xlabel="capacity, blocks", ylabel="%", ylim=(max(lowest - 5, -60), None))
    axes.set_title(f"{rows[0]['trace']}: of the gap between LRU (0) and the optimum (100)")
    axes.legend(loc="lower right")


def _first_tokens(axes: Any, rows: Sequence[Row]) -> None:
    for row in rows[:MOST_BARS]:
        axes.plot([max(ms, 0.1) for ms in row["ttft_ms_percentiles"]], range(101), label=_label(row))
    axes.set(xscale="log", xlabel="time to the first token, ms", ylabel="% of requests", ylim=(0, 100))
    axes.set_title(f"{rows[0]['trace']}: first tokens")
    axes.legend(fontsize=7, loc="lower right")


def _costs(axes: Any, rows: Sequence[Row]) -> None:
    shown = rows[:MOST_BARS]
    left = [0.0] * len(shown)
    for part in shown[0]["usd_parts"]:
        widths = [row["usd_parts"][part] for row in shown]
        axes.barh([_label(row) for row in shown], widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xlabel="$ per million tokens", title=f"{shown[0]['trace']}: cost")
    axes.legend(loc="lower right")


def _timeline(axes: Any, rows: Sequence[Row]) -> None:
    """The first row that has one."""
    moments = rows[0]["timeline"]
    seconds = [moment["seconds"] for moment in moments]
    for tier in moments[0]["used_bytes"]:
        axes.plot(seconds, [moment["used_bytes"][tier] / GIB for moment in moments], label=f"{tier}, GiB")
    beside = axes.twinx()
    beside.plot(seconds, [moment["waiting"] for moment in moments], color="gray", linewidth=0.8)
    beside.set_ylabel("requests waiting (gray)")
    beside.grid(visible=False)
    axes.set(xlabel="seconds", ylabel="GiB used", title=f"{rows[0]['trace']}: the tiers, {_label(rows[0])}")
    axes.legend(loc="upper left")


def _has_gap(row: Row) -> bool:
    """LRU and the optimum are the two ends of the scale."""
    return row.get("gap_closed") is not None and row["policy"] not in ("lru", "belady")


def _by_policy(rows: Sequence[Row], figure: str) -> dict[str, list[tuple[int, float]]]:
    """Policy -> (capacity, percent), by capacity."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["capacity_blocks"] is not None and row.get(figure) is not None:
            found.setdefault(row["policy"], []).append((row["capacity_blocks"], 100 * row[figure]))
    return {name: sorted(points) for name, points in found.items()}


def _label(row: Row) -> str:
    """What tells a row from its neighbours."""
    parts = [
        row.get(name) for name in ("policy", "capacity_blocks", "write_policy", "prefetch_policy", "name")
    ]
    return " ".join(str(part) for part in parts if part is not None) or row["trace"]
