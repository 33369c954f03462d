"""What the engine counts. Counters only grow; gauges are set after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class EngineStats:
    """Read by metrics from another thread: single fields are consistent, the whole need not be."""

    prompt_tokens: int = 0
    """Prompt tokens of requests, counted once, at first admission: the cache's queries."""
    cached_tokens: int = 0
    """Those of them that were not computed for their request: the cache's hits."""
    cached_by_tier: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("device", "host", "disk"), 0)
    )
    """The hits by where they were when their request arrived."""
    queries_by_tier: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("device", "host", "disk"), 0)
    )
    """The queries by tier: tokens that no tier above had when their request arrived."""
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, recomputation after retractions included."""
    constrained_tokens: int = 0
    """Generated tokens of requests with a constraint."""
    jumped_tokens: int = 0
    """Those of them that the constraint forced, and that were taken without a step of their own."""
    masks: int = 0
    """How often it was found out which tokens may come next."""
    mask_seconds: float = 0.0
    """Time of the loop for that, while the device computes."""
    steps: int = 0
    retractions: int = 0
    faults: int = 0
    """Steps that failed on the device."""
    finished: dict[str, int] = field(default_factory=dict)
    """Ended requests by finish reason."""
    device_busy_seconds: float = 0.0
    host_seconds: float = 0.0
    """Time of the loop outside waiting for the device."""
    compiles: int = 0
    """Programs compiled since the start; flat after warm-up."""
    loaded_programs: int = 0
    """Programs that an earlier start had compiled, loaded from disk; flat after warm-up too."""

    slots: int = 0
    """Requests that can run at a time."""
    step_programs: int = 0
    """Programs that the warm-up goes through."""
    warm_programs: int = 0
    """Those of them that are ready."""
    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_evictable: int = 0
    pages_in_use: int = 0
    evicted_pages: int = 0

    def count_query(self, prompt_tokens: int, found: tuple[int, int, int]) -> None:
        """A request is admitted; `found`: how far its prompt was known at its arrival, by tier (`Request.found`)."""
        self.prompt_tokens += prompt_tokens
        for tier, above in zip(self.queries_by_tier, (0, *found[:2]), strict=True):
            self.queries_by_tier[tier] += prompt_tokens - above

    def count_hit(self, by_tier: dict[str, int]) -> None:
        """So many prompt tokens need not be computed, by tier."""
        for tier, tokens in by_tier.items():
            self.cached_by_tier[tier] += tokens
            self.cached_tokens += tokens


def total(parts: Sequence[T]) -> T:
    """Several objects of one dataclass as one: numbers are added up, also within lists and mappings. None and nothing make
    nothing."""
    return type(parts[0])(**{f.name: _sum([getattr(p, f.name) for p in parts]) for f in fields(parts[0])})  # pyright: ignore[reportArgumentType]


def _sum(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        # Copied first: their owners may add to them meanwhile.
        parts = [dict(value) for value in values]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _sum([part[name] for part in parts if name in part]) for name in names}
    if isinstance(first, list):
        return [_sum(column) for column in zip(*values, strict=True)]
    known = [value for value in values if value is not None]
    return sum(known) if known else None
