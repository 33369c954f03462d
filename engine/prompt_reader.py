"""Reads the prompts of a step that want it, out of the hidden states that its forward leaves on the device.

The positions of all such rows are taken together, in pieces of one of two sizes, so that logits are never larger than a
piece and there is one `score` and one `add_up` program per size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from .plan import Row
from .reading import HiddenSum, PromptScores, ReadPart
from .request import TokenLogprob
from .sampler import ScoreOutput
from .step_device import StepDevice

MAX_PIECE, SMALL_PIECE = 256, 32
_LOGITS_OF_PIECE = 1 << 24
"""Logits of a piece are no more than this: 64 MiB in f32."""


@dataclass(frozen=True, slots=True)
class _Share:
    """A row to read, and where in the step its positions begin."""

    row: Row
    at: int

    @property
    def places(self) -> range:
        return range(self.at, self.at + len(self.row.read))


@dataclass(frozen=True, slots=True)
class Pending:
    """What a step was asked to read; its arrays are on their way."""

    scored: list[_Share]
    scores: list[tuple[int, ScoreOutput]]
    """Pieces: how many of its rows count, and what they say."""
    summed: list[_Share]
    sums: list[jax.Array]
    """Pieces: f32 `[len(summed) or more, D]`."""


class PromptReader:
    """Reads prompts for `JaxExecutor`. Holds nothing of a step."""

    def __init__(self, device: StepDevice, vocab_size: int, max_num_seqs: int) -> None:
        largest = max(SMALL_PIECE, min(MAX_PIECE, _LOGITS_OF_PIECE // vocab_size))
        self.sizes = (SMALL_PIECE, 1 << (largest.bit_length() - 1))
        self._device = device
        self._groups = max_num_seqs

    def start(self, rows: Sequence[Row], padded: int) -> Pending:
        """Dispatches what the rows of a step ask for, whose forward is the last one; padded: to so many tokens."""
        scored, summed = [], []
        at = 0
        for row in rows:
            if row.read:
                kind = scored if isinstance(row.request.reading, PromptScores) else summed
                kind.append(_Share(row, at + row.read.start - row.start))
            at += row.count
        return Pending(scored, list(self._score(scored)), summed, list(self._sum(summed, padded)))

    def finish(self, pending: Pending, rows: Sequence[Row]) -> list[ReadPart]:
        """Waits for what `start` dispatched for the same rows: a part for each that asked, in order."""
        parts: dict[int, ReadPart] = {}  # by identity: rows are not hashable
        if pending.scored:
            parts |= zip((id(share.row) for share in pending.scored), _logprobs(pending), strict=True)
        if pending.summed:
            sums = np.sum([np.asarray(piece, np.float64) for piece in pending.sums], axis=0)
            for share, total in zip(pending.summed, sums, strict=False):
                parts[id(share.row)] = HiddenSum(len(share.row.read), total)
        return [parts[id(row)] for row in rows if row.read]

    def prepare_take(self, tokens: int) -> None:
        """Makes the programs that the hidden states of a forward need which is padded to `tokens`."""
        for size in self.sizes:
            self._device.prepare_take(tokens, np.zeros(size, np.int32))

    def prepare(self) -> None:
        """Makes the rest, which do not depend on the shape of a step's hidden states; after some forward."""
        for size in self.sizes:
            nothing = np.zeros(size, np.int32)
            self._device.prepare_score(nothing, nothing != 0)
            self._device.prepare_add_up(nothing, self._groups)

    def _score(self, shares: Sequence[_Share]) -> Iterator[tuple[int, ScoreOutput]]:
        columns = [
            (place, share.row.request.tokens[position + 1], top)
            for share in shares
            if isinstance(share.row.request.reading, PromptScores)
            for top in (share.row.request.reading.top > 0,)
            for place, position in zip(share.places, share.row.read, strict=True)
        ]
        for count, padded in self._pieces(np.asarray(columns, np.int32).reshape(-1, 3), fill=0):
            yield count, self._device.score(padded[:, 0], padded[:, 1], padded[:, 2] != 0)

    def _sum(self, shares: Sequence[_Share], tokens: int) -> Iterator[jax.Array]:
        columns = [(place, group) for group, share in enumerate(shares) for place in share.places]
        for _, padded in self._pieces(np.asarray(columns, np.int32).reshape(-1, 2), fill=self._groups):
            # The group of padding does not exist; its place does, whatever is there.
            yield self._device.add_up(np.minimum(padded[:, 0], tokens - 1), padded[:, 1], self._groups)

    def _pieces(self, columns: np.ndarray, fill: int) -> Iterator[tuple[int, np.ndarray]]:
        small, large = self.sizes
        at = 0
        while at < len(columns):
            left = len(columns) - at
            size = small if left <= large // 4 else large
            count = min(size, left)
            padded = np.full((size, columns.shape[1]), fill, np.int32)
            padded[:count] = columns[at : at + count]
            yield count, padded
            at += count


def _logprobs(pending: Pending) -> Iterator[list[TokenLogprob]]:
    def whole(field: str) -> np.ndarray:
        return np.concatenate(
            [np.asarray(getattr(output, field))[:count] for count, output in pending.scores]
        )

    logprobs, ranks = whole("logprobs").tolist(), whole("ranks").tolist()
    most = max(_top(share) for share in pending.scored)
    ids, values = whole("top_ids")[:, :most].tolist(), whole("top_logprobs")[:, :most].tolist()
    at = 0
    for share in pending.scored:
        request, top, part = share.row.request, _top(share), []
        for index, position in enumerate(share.row.read, at):
            likeliest = tuple(zip(ids[index][:top], values[index][:top], strict=True))
            part.append(TokenLogprob(request.tokens[position + 1], logprobs[index], likeliest, ranks[index]))
        at += len(share.row.read)
        yield part


def _top(share: _Share) -> int:
    reading = share.row.request.reading
    assert isinstance(reading, PromptScores)
    return reading.top
