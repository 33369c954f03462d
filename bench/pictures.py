"""Pictures of benchmarks: panels, and a file with one below the other. matplotlib is loaded here, and nowhere before."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png", ".pdf")
"""Of the files that `save` can write."""
MISSING = "pictures need matplotlib: pip install 'tierax[lab]'"

Panel = Callable[[Any], None]
"""Draws on matplotlib's axes."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def cumulative(lines: Mapping[str, Sequence[float]], label: str, title: str) -> Panel:
    """The share of values up to each value, a line for each name."""

    def draw(axes: Any) -> None:
        for name, values in lines.items():
            ordered = sorted(values)
            shares = [100 * (place + 1) / len(ordered) for place in range(len(ordered))]
            axes.step([ordered[0], *ordered], [0, *shares], where="post", label=name)
        axes.set(xscale="log", xlabel=label, ylabel="% of requests", ylim=(0, 100), title=title)
        axes.legend(fontsize=8, loc="lower right")

    return draw


def curve(lines: Mapping[str, Sequence[tuple[float, float]]], label: str, value: str, title: str) -> Panel:
    """(x, y) points joined, a line for each name."""

    def draw(axes: Any) -> None:
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel=label, ylabel=value, ylim=(0, None), title=title)
        axes.legend(fontsize=8, loc="lower right")

    return draw


def bars(values: Mapping[str, float], label: str, title: str) -> Panel:
    """A bar for each name, with its value."""

    def draw(axes: Any) -> None:
        drawn = axes.barh(list(values), list(values.values()))
        axes.bar_label(drawn, fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set(xlabel=label, title=title)

    return draw


def save(path: Path, *panels: Panel) -> None:
    """Writes the panels, the first on top. Raises `OSError`."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "backend": "agg",
        "figure.figsize": (8, 4.2 * len(panels)),
        "font.size": 10,
        "axes.grid": True,
        "svg.hashsalt": "tierax",
    }
    with mpl.rc_context(style):
        figure, places = plt.subplots(len(panels), layout="constrained", squeeze=False)
        for panel, axes in zip(panels, places[:, 0], strict=True):
            panel(axes)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the date the same figures give the same file.
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
