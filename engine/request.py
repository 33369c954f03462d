"""What a request is, from a caller's parameters to the state that the scheduler keeps. Pure: no jax, no clock."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..cache.leases import Lease
from .prefetch_policy import PrefetchPolicy

if TYPE_CHECKING:
    from .constraint import Constraint, Matcher
    from .reading import Reading

FinishReason = str
"""`stop` (end token or stop string), `length`, `abort`, or `error`."""


@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens; the fields and defaults that users of OpenAI-style engines know.

    `engine.validate.check_sampling` refuses out-of-range values with `ParameterError`.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 = all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that the text shows although it skips the others."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probs; k: the chosen token's and the k likeliest ones', of the raw model distribution."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens from `prompt_logprobs_start` on. These are computed, whatever is cached."""
    prompt_logprobs_start: int = 1
    """The first of the prompt's tokens to be scored. What comes before may be cached; the very first token has no score."""
    constraint: Constraint | None = None
    """What the whole text must match; None: anything."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probs at one position, generated or of a prompt."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """`(token id, log-prob)`, likeliest first; as many as were asked for."""
    rank: int | None = None
    """Place of the token among all by likelihood, from 1; known for prompts only."""


@dataclass(slots=True)
class Delta:
    """What one step added to a request; the text may lag the tokens (split characters, possible stop strings)."""

    request: Request
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None = None
    error: str | None = None


class OutputText(Protocol):
    """Turns a request's tokens into text and watches for stop strings; one per request."""

    def append(self, token_id: int) -> tuple[str, bool]:
        """Adds a token; returns the text that is now final and whether a stop string matched."""
        ...

    def flush(self) -> str:
        """The held-back rest, once no more tokens come."""
        ...


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# A name of its own for what is asked of every token: looking up a member of an enum takes ten times as long.
RUNNING, FINISHED = Status.RUNNING, Status.FINISHED


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one call, as the loop sees it. `tokens` is the prompt followed by the accepted output."""

    id: str
    tokens: array[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    """Resolved: `params.seed` (mixed with the choice's index) or drawn from the engine's generator."""
    stop_ids: frozenset[int]
    """Ids that end the request: model's end tokens (unless `ignore_eos`) and `stop_token_ids`."""
    max_total: int
    """Prompt plus output never exceed this; fixed at arrival from max_tokens, context and pool size."""
    namespace: bytes = b""
    """Requests share KV only within a namespace (tenant salt)."""
    priority: int = 0
    """Lower is sooner."""
    text: OutputText | None = None
    reading: Reading | None = None
    """What is wanted of the prompt itself; complete with the first delta."""
    matcher: Matcher | None = None
    """Follows the output, if it is constrained: it knows all of it that `tokens` has."""
    on_delta: Callable[[Delta], None] | None = None

    status: Status = Status.WAITING
    arrival: float = 0.0
    waiting_since: float = 0.0
    """Its arrival, or its last retraction."""
    waited: float = 0.0
    """Seconds of waiting before its last admission."""
    first_scheduled: float | None = None
    first_token: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None
    prefetch: PrefetchPolicy | None = None
    """How long to wait for the disk; None = as the engine does."""
    found: tuple[int, int, int] = (0, 0, 0)
    """How far the prompt was known at arrival, in tokens: on the device; on device or host; on any tier."""
    turn: float = 0.0
    """When it was expected, at its arrival, that its prompt could be computed."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed for this request, up to its first retraction; what usage reports."""
    lease: Lease | None = None
    slot: int = -1
    """Row of the per-request device state while running; -1 otherwise."""
    residency: int = 0
    """Counts admissions, so that the executor sets the slot's state up anew after a retraction."""
    num_computed: int = 0
    """Positions whose KV has been submitted to the device."""
    in_flight: int = 0
    """Sampled tokens not collected yet (0 or 1)."""

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """`cached_tokens` by where they were when the request arrived. What another request computed or brought up
        meanwhile counts as found on the device."""
        return self._by_tier(self.cached_tokens)

    def add_hit(self, tokens: int) -> dict[str, int]:
        """So many more prompt tokens need not be computed; returns them by tier."""
        before = self.cached_by_tier
        self.cached_tokens += tokens
        return {tier: count - before[tier] for tier, count in self.cached_by_tier.items()}

    def _by_tier(self, cached: int) -> dict[str, int]:
        device, host, disk = (min(tokens, cached) for tokens in self.found)
        return {"device": device + cached - disk, "host": host - device, "disk": disk - host}

    @property
    def generates(self) -> bool:
        """Whether there is room for output; otherwise the request ends with its prompt."""
        return self.max_total > self.num_prompt

    @property
    def penalizes(self) -> bool:
        """Whether its tokens' likelihood depends on those that came before, so that the device keeps count of them."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    @property
    def jumps(self) -> bool:
        """Forced tokens may be taken without being sampled: nobody asks for log-probs, nor for counts on the device."""
        return self.params.logprobs is None and not self.penalizes

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come out of the cache."""
        most = len(self.tokens) - 1
        if self.reading is None or self.reading.claimed >= self.reading.total:
            return most
        return self.reading.claimed

    @property
    def may_load(self) -> bool:
        """Whether host and disk can be of use."""
        return self.reading is None or self.reading.first > 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Known tokens plus those still in flight."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Positions to compute before the next token can be sampled, that token's own input included."""
        return self.length - self.num_computed


def held_lease(request: Request) -> Lease:
    """What a running request, or one that is being loaded, holds of the device."""
    assert request.lease is not None, "the request is not running"
    return request.lease
