"""Pictures of benchmarks. matplotlib is loaded here, and nowhere before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class MissingLibrary(Exception):
    """matplotlib is not installed; the message says how to get it."""


def cumulative(lines: Mapping[str, Sequence[float]], path: Path, label: str, title: str) -> None:
    """The share of values up to each value, a line for each name. Raises `MissingLibrary`, `OSError`."""

    def draw(axes: Any) -> None:
        for name, values in lines.items():
            ordered = sorted(values)
            shares = [100 * (place + 1) / len(ordered) for place in range(len(ordered))]
            axes.step([ordered[0], *ordered], [0, *shares], where="post", label=name)
        axes.set(xscale="log", xlabel=label, ylabel="% of requests", ylim=(0, 100), title=title)
        axes.legend(fontsize=8)

    _picture(path, draw)


def curve(
    lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, label: str, value: str, title: str
) -> None:
    """(x, y) points joined, a line for each name."""

    def draw(axes: Any) -> None:
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel=label, ylabel=value, ylim=(0, None), title=title)
        axes.legend(fontsize=8)

    _picture(path, draw)


def bars(values: Mapping[str, float], path: Path, label: str, title: str) -> None:
    """A bar for each name, with its value."""

    def draw(axes: Any) -> None:
        drawn = axes.barh(list(values), list(values.values()))
        axes.bar_label(drawn, fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set(xlabel=label, title=title)

    _picture(path, draw)


def _picture(path: Path, draw: Callable[[Any], None]) -> None:
    try:
        import matplotlib as mpl
        import matplotlib.pyplot as plt
    except ImportError:
        raise MissingLibrary("pictures need matplotlib: pip install 'tierax[lab]'") from None
    style: dict[Any, Any] = {
        "backend": "agg",
        "figure.figsize": (8, 4.2),
        "font.size": 10,
        "axes.grid": True,
        "svg.hashsalt": "tierax",
    }
    with mpl.rc_context(style):
        figure, axes = plt.subplots(layout="constrained")
        draw(axes)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the date the same figures give the same file.
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
