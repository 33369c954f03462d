"""What a section of `tierax bench report` is, and what each is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import agents
from .cache_engine import EngineMaker, PageSize
from .offline import Shapes
from .talks import Workload


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
    talks: Workload
    """Of `peers`."""
    peers: Mapping[str, str]
    """Name -> an interpreter that has it."""
    runs: int
    """Of `peers`."""
    shapes: Shapes
    """Of `speed`."""
    limits: Mapping[str, Any]
    """Settings of the engine of `speed`, by the names of `EngineConfig`."""


@dataclass(frozen=True, slots=True)
class Section:
    """`measure` gives figures; `show` a text in Markdown, with pictures in the folder that it is given."""

    title: str
    measure: Callable[[Plan, Mapping[str, Any]], dict[str, Any]]
    """The second argument has the figures of the sections before."""
    show: Callable[[dict[str, Any], Path], str]
    brief: Callable[[dict[str, Any]], list[tuple[str, str]]] = lambda _: []
    """What of it belongs into the summary at the head of the page: what was compared, and the figure."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times(value: float) -> str:
    """A ratio, as people read it: `5.6 times`, `0.66 times`."""
    return f"{value:.1f} times" if value >= 1.995 else f"{value:.2f} times"
