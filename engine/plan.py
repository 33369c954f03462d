"""What the loop asks of an executor, and what it gets back. Pure data shared by the real and the simulated device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .request import Request


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step: positions `[start, start + count)` are computed.

    `sample` rows end at the request's last known (or in-flight) token and yield one new token.
    """

    request: Request
    start: int
    count: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step: prefill chunks first, then decodes (rows of one token), never empty.

    The KV of *all* rows is written before any row attends, layer by layer, so a row may read
    pages that another row of the same plan computes.
    """

    step: int
    chunks: tuple[Row, ...]
    decodes: tuple[Row, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.chunks + self.decodes

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.chunks) + len(self.decodes)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one `sample` row; `top` holds up to 20 likeliest `(id, log-prob)` if any row asked for them."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Executor(Protocol):
    """A device that runs plans strictly in the order of submission."""

    def submit(self, plan: StepPlan) -> None:
        """Starts a step and returns at once. Page tables and tokens are read before it returns."""
        ...

    def collect(self) -> list[Sampled]:
        """Waits for the oldest step; one entry per `sample` row, in the order of `plan.rows`."""
        ...

    def reset(self) -> None:
        """Forgets steps in flight and all KV, after a fault."""
        ...


class Transfers(Protocol):
    """Movements of KV between the tiers. They proceed while steps run and are looked at between them."""

    def start(self, request: Request, now: float) -> None:
        """On arrival: begins to bring up what the lower tiers hold of the request's prompt."""
        ...

    def poll(self, now: float) -> None:
        """Observes what has finished and places it."""
        ...

    def ready(self, request: Request, now: float) -> bool:
        """Whether the request's prefetch policy lets it be admitted now."""
        ...

    def cancel(self, request: Request) -> None:
        """The request has ended; its movements need not be waited for."""
        ...


class NoTransfers:
    """A cache of one tier: nothing ever moves."""

    def start(self, request: Request, now: float) -> None:
        pass

    def poll(self, now: float) -> None:
        pass

    def ready(self, request: Request, now: float) -> bool:
        return True

    def cancel(self, request: Request) -> None:
        pass
