"""What every trace is here, whatever format it came in: requests over prompts that are named block by block."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class TraceRequest:
    """One request of a trace."""

    arrival: float
    """Seconds since the start of the trace."""
    blocks: array[int]
    """An id per block of the prompt, then of the answer as far as the trace names it. The same id behind the same ids
    stands for the same tokens; ids are from 0 to 2^31 - 1."""
    prompt_tokens: int
    output_tokens: int
    sizes: tuple[int, ...] | None = None
    """Tokens of every block, where blocks differ; None: all are of the trace's `block_tokens`, but for the last."""
    session: str = ""
    """Requests of one conversation; empty where the trace does not say."""
    turn: int = 0
    """Place in the session, from 0."""
    think: float | None = None
    """Seconds from the end of the turn before to this arrival; None: not known, or the first turn."""
    tenant: str = ""
    """Nothing is shared between tenants."""


@dataclass(slots=True, eq=False)
class Trace:
    """Requests in file order, which need not be the order of arrival."""

    name: str
    requests: list[TraceRequest]
    block_tokens: int
    """Tokens of a block; where blocks differ, a typical number."""
    notes: list[str] = field(default_factory=list)
    """What was assumed in reading it, for people."""

    def prompt_sizes(self, request: TraceRequest) -> list[int]:
        """Tokens of each block of the prompt, the last one cut where the prompt ends."""
        left, sizes = request.prompt_tokens, []
        for size in request.sizes or (self.block_tokens,) * len(request.blocks):
            if left <= 0:
                break
            sizes.append(min(size, left))
            left -= size
        return sizes

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    def head(self, count: int) -> Trace:
        """The first requests of the trace."""
        return Trace(self.name, self.requests[:count], self.block_tokens, self.notes)
