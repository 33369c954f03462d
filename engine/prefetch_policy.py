"""How long a request waits for its prefix to come up from the disk."""

from __future__ import annotations

import re
from typing import NamedTuple

_TIMEOUT = re.compile(r"timeout=(\d+(?:\.\d+)?)(ms|s)")


class PrefetchPolicy(NamedTuple):
    """A request starts when all of its prefix is there, or `patience` seconds after its arrival."""

    name: str
    patience: float

    @classmethod
    def parse(cls, text: str, *, name: str = "prefetch_policy") -> PrefetchPolicy:
        """Of `best_effort`, `wait_complete` or `timeout=300ms`. Raises ValueError naming `name`."""
        if text == "best_effort":
            return cls(text, 0.0)
        if text == "wait_complete":
            return cls(text, float("inf"))
        match = _TIMEOUT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{name}: {text!r} must be best_effort, wait_complete or timeout=N ms, e.g. timeout=300ms"
            )
        return cls(text, float(match[1]) / (1000 if match[2] == "ms" else 1))
