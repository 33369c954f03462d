"""What the loop asks of an executor, and what it gets back. Pure data shared by the real and the simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .reading import ReadPart, claim
from .request import Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Mask = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    shared_step_tokens: int | None = None
    """Tokens of a step that one prompt leaves shorter than that, decodes included; None: `max_num_batched_tokens`.

    The first tokens of all prompts in a step wait for all of it, and so does who comes meanwhile: short prompts are not put
    together to one long step. A step that one prompt makes long anyway is filled: long steps cost less per token.
    """


@dataclass(slots=True)
class Row:
    """One request's share of a step: positions `[start, start + count)` are computed. Nobody changes it; that it is not
    frozen makes it three times as cheap, and there is one for every token.

    `sample` rows end at the request's last known (or in-flight) token and yield one new token. `read` are the positions
    that the request's reading wants of this row.
    """

    request: Request
    start: int
    count: int
    sample: bool
    read: range = range(0)

    def with_reading(self) -> Row:
        """The same, with what the request's reading wants of it."""
        assert self.request.reading is not None
        return replace(self, read=claim(self.request.reading, self.start, self.start + self.count))


class Room:
    """What a step has left for prompts, in tokens."""

    def __init__(self, limits: Limits, decodes: int) -> None:
        self.left = limits.max_num_batched_tokens - decodes
        self._shared = (limits.shared_step_tokens or limits.max_num_batched_tokens) - decodes

    def take(self, count: int) -> None:
        """So many tokens of a prompt are computed; what is left is for others."""
        if count <= self._shared:
            self.left = min(self.left, self._shared)
        self.left -= count
        # The first prompt has decided what kind of step it is.
        self._shared = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step: prefill chunks first, then decodes (rows of one token), never empty.

    The KV of *all* rows is written before any row attends, layer by layer, so a row may read
    pages that another row of the same plan computes.
    """

    step: int
    chunks: tuple[Row, ...]
    decodes: tuple[Row, ...]
    rows: tuple[Row, ...] = field(init=False)
    """Both."""
    sampling: tuple[Row, ...] = field(init=False)
    """The rows that yield a token."""

    def __post_init__(self) -> None:
        rows = self.chunks + self.decodes
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "sampling", tuple([row for row in rows if row.sample]))

    @property
    def constrained(self) -> bool:
        """A token of it has a constraint: nothing can be sampled before the tokens of all earlier steps are known."""
        # Asked of every token, and a generator takes three times as long.
        for row in self.sampling:  # noqa: SIM110
            if row.request.matcher is not None:
                return True
        return False

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.chunks) + len(self.decodes)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one `sample` row; `top` holds up to 20 likeliest `(id, log-prob)` if any row asked for them."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Collected(NamedTuple):
    """What a step brought."""

    sampled: list[Sampled]
    """One entry per `sample` row, in the order of `StepPlan.rows`."""
    read: list[ReadPart]
    """One entry per row with something to read, in that order."""


class Executor(Protocol):
    """A device that runs plans strictly in the order of submission."""

    def submit(self, plan: StepPlan) -> None:
        """Starts a step and returns at once. Page tables and tokens are read before it returns.

        A constrained plan's tokens are not sampled before `choose`.
        """
        ...

    def choose(self, masks: Sequence[Mask | None]) -> None:
        """Lets the step submitted last, whose plan is constrained, sample. Called once, before the next `submit`.

        One entry per `sample` row: the tokens that may come (`constraint.Matcher.mask`), None = all.
        """
        ...

    def collect(self) -> Collected:
        """Waits for the oldest step."""
        ...

    def reset(self) -> None:
        """Forgets steps in flight and all KV, after a fault."""
        ...


class Transfers(Protocol):
    """Movements of KV between the tiers. They proceed while steps run and are looked at between them."""

    @property
    def busy(self) -> bool:
        """Something is under way, or owed, that wants to be looked after."""
        ...

    def start(self, request: Request, now: float, running: int) -> None:
        """On arrival: notes which tier holds what of the prompt, and begins to bring up what the disk holds. `running`: tokens
        that are still to be computed of the prompts that run."""
        ...

    def poll(self, now: float) -> None:
        """Before a step is planned: observes what has finished, and places it."""
        ...

    def ready(self, request: Request, now: float) -> bool:
        """Whether the request's prefetch policy lets it take its pages now."""
        ...

    def loadable(self, request: Request) -> bool:
        """Whether the host has pages for the request that the device has not."""
        ...

    def load(self, request: Request) -> bool:
        """The request has a lease, with room promised for all of its prompt: begins to fill it with what the host has.

        False if there is nothing to wait for.
        """
        ...

    def loaded(self, request: Request, now: float) -> bool:
        """Whether that has come to its end; what has arrived is in the lease's shared pages then."""
        ...

    def unload(self, request: Request) -> None:
        """The request gives its lease back before it was loaded."""
        ...

    def end(self, request: Request) -> None:
        """The request has started or ended: nothing is waited for any more."""
        ...

    def before_step(self) -> None:
        """A step is planned: what it may overwrite is saved now."""
        ...

    def after_step(self, now: float) -> None:
        """Sends down what the write policy wants kept."""
        ...

    def prefilled(self, tokens: int, seconds: float, now: float) -> None:
        """The device has computed so many prompt tokens in so much time."""
        ...

    def reset(self) -> set[int]:
        """The device has lost its pages: nothing is held or waited for; returns the host rows that were not filled."""
        ...

    def check(self) -> None:
        """Asserts the invariants, for tests."""
        ...


class NoTransfers:
    """A cache of one tier: nothing ever moves."""

    busy = False

    def start(self, request: Request, now: float, running: int) -> None:
        pass

    def poll(self, now: float) -> None:
        pass

    def ready(self, request: Request, now: float) -> bool:
        return True

    def loadable(self, request: Request) -> bool:
        return False

    def load(self, request: Request) -> bool:
        return False

    def loaded(self, request: Request, now: float) -> bool:
        return True

    def unload(self, request: Request) -> None:
        pass

    def end(self, request: Request) -> None:
        pass

    def before_step(self) -> None:
        pass

    def after_step(self, now: float) -> None:
        pass

    def prefilled(self, tokens: int, seconds: float, now: float) -> None:
        pass

    def reset(self) -> set[int]:
        return set()

    def check(self) -> None:
        pass
