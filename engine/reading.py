"""What a request may want of its prompt beside the next token: log-probs of the prompt's own tokens, or a mean.

A reading needs the hidden states of the prompt positions `[first, total)`, each once and in order. The scheduler claims
positions with the step that computes them, and the loop adds what comes of them. A position whose KV lies in the cache
has no hidden state there, so that a request is given cached pages up to `claimed` only: up to `first`, the first position
that is wanted, when it comes, and what it has read itself after a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .request import TokenLogprob


@dataclass(slots=True, eq=False)
class PromptScores:
    """The log-probs of the prompt's tokens from index `start` on, given those before them."""

    total: int
    """One less than the prompt's tokens: what the last one predicts is no part of the prompt."""
    top: int
    """How many of the likeliest tokens are wanted beside each."""
    start: int = 1
    """At least 1; may lie beyond the prompt."""
    claimed: int = 0
    """Where the positions end whose computation is planned."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens from `start` on, as far as they are known."""

    def __post_init__(self) -> None:
        self.claimed = self.first

    @property
    def first(self) -> int:
        return min(self.start - 1, self.total)

    @property
    def done(self) -> int:
        """Where the positions end that `logprobs` has."""
        return self.first + len(self.logprobs)

    def add(self, part: Sequence[TokenLogprob]) -> None:
        """Takes over what the next positions brought."""
        self.logprobs += part


@dataclass(slots=True, eq=False)
class MeanHidden:
    """The mean of the prompt's last hidden states, which makes an embedding."""

    total: int
    """All of the prompt's tokens."""
    claimed: int = 0
    """Positions whose computation is planned."""
    done: int = 0
    """Positions that `sum` has."""
    sum: NDArray[np.float64] | None = None

    @property
    def first(self) -> int:
        return 0

    def add(self, part: HiddenSum) -> None:
        """Takes over what the next positions brought."""
        self.done += part.count
        self.sum = part.sum if self.sum is None else self.sum + part.sum

    @property
    def embedding(self) -> NDArray[np.float32]:
        """The mean, scaled to length 1 (a vector of zeros stays one); complete once the request has ended."""
        assert self.sum is not None
        length = float(np.linalg.norm(self.sum))
        return (self.sum / (length or 1.0)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class HiddenSum:
    """The sum of the hidden states of `count` positions."""

    count: int
    sum: NDArray[np.float64]


Reading = PromptScores | MeanHidden
ReadPart = Sequence[TokenLogprob] | HiddenSum
"""What one step brings for a reading: of its own kind."""


def claim(reading: Reading, start: int, end: int) -> range:
    """The positions of `[start, end)` that are still to be read; from now on they count as claimed."""
    first, reading.claimed = reading.claimed, max(reading.claimed, min(end, reading.total))
    assert first >= start or first == reading.claimed, "a position was computed, but not read"
    return range(first, reading.claimed)


def unclaim(reading: Reading) -> None:
    """What is claimed, but not there, will not come: the device was lost."""
    reading.claimed = reading.done
