"""Figures beside what was promised of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .report import number, table


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that should be at most, or at least, so much."""

    name: str
    value: float
    sense: Literal["<=", ">="]
    limit: float
    percent: bool = False
    """Both are shares, to be shown in percent."""

    @property
    def reached(self) -> bool:
        return {"<=": operator.le, ">=": operator.ge}[self.sense](self.value, self.limit)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"reached": self.reached}


def targets_table(targets: Iterable[Target]) -> str:
    """One row each: figure, target, verdict."""
    rows = [
        [
            t.name,
            _show(t, t.value),
            f"{t.sense} {_show(t, t.limit)}",
            "reached" if t.reached else "NOT REACHED",
        ]
        for t in targets
    ]
    return table(["", "is", "target", ""], rows)


def _show(target: Target, value: float) -> str:
    return f"{value:.1%}" if target.percent else number(value)
