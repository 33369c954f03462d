"""A device in plain Python with a clock that tests turn.

The "model" sees only what it reaches through page tables, as a real one does: a cell of a page holds what was
written there, a row reads every position of its request through its table, and the next token follows from that
alone. A freed page in use, an alias, or KV that was never computed fails at once or changes the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierax.engine.constraint import Matcher
from tierax.engine.plan import Collected, Row, Sampled, StepPlan
from tierax.engine.reading import HiddenSum, MeanHidden, ReadPart
from tierax.engine.request import Request, Status, TokenLogprob

Model = Callable[[int, int, int], int]
"""(hash of all tokens so far, seed, position of the token to choose) -> the token."""

_MODULUS = (1 << 61) - 1


class ManualClock:
    """Seconds that pass only when a test or the fake device says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def fold(history: int, token: int) -> int:
    """The hash of a sequence one token longer."""
    return (history * 1_000_003 + token + 7) % _MODULUS


def hash_model(history: int, seed: int, position: int) -> int:
    """A token from 0 to 99."""
    mixed = (history ^ (seed * 0x9E3779B97F4A7C15) ^ (position << 17)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    return (mixed >> 33) % 100


def allowed(token: int, mask: NDArray[np.int32] | None) -> int:
    """What becomes of a model's choice under a mask."""
    if mask is None:
        return token
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert ids, "a mask that allows nothing"
    return token if token in ids else ids[token % len(ids)]


def solo(request: Request, model: Model = hash_model, matcher: Matcher | None = None) -> list[int]:
    """The output of a request by itself, without engine, pages or cache (text stops are not looked at).

    `matcher`: a new one of the request's constraint.
    """
    history = 0
    for token in request.tokens[: request.num_prompt]:
        history = fold(history, token)
    output: list[int] = []
    for position in range(request.num_prompt, request.max_total):
        token = allowed(model(history, request.seed, position), None if matcher is None else matcher.mask)
        output.append(token)
        if token in request.stop_ids and len(output) > request.params.min_tokens:
            break
        if matcher is not None:
            matcher.advance(token)
            if matcher.ended:
                break
        history = fold(history, token)
    return output


class Cell(NamedTuple):
    """The KV of one position: it stands for the token, its place, and all that came before it."""

    namespace: bytes
    position: int
    token: int
    history: int


@dataclass(slots=True)
class Bound:
    """A row with all that `submit` may read of its request."""

    row: Row
    slot: int
    residency: int
    pages: list[int]
    tokens: list[int]


class FakeExecutor:
    """Implements `plan.Executor`. A step takes `seconds_per_token` for each of its tokens."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        clock: ManualClock,
        *,
        model: Model = hash_model,
        seconds_per_token: float = 0.001,
    ) -> None:
        self.page_size = page_size
        self.plans: list[StepPlan] = []
        """All that were submitted."""
        self.submit_error: Exception | None = None
        """Raised by the next `submit`, once."""
        self.choose_error: Exception | None = None
        """Raised by the next `choose`, once."""
        self.collect_error: Exception | None = None
        """Raised by the next `collect`, once."""
        self.resets = 0
        self._num_pages = num_pages
        self._clock = clock
        self._model = model
        self._seconds_per_token = seconds_per_token
        self._free_at = 0.0
        self._start_empty()

    def _start_empty(self) -> None:
        self._cells: dict[tuple[int, int], Cell] = {}
        self._last: dict[int, tuple[Request, int, int]] = {}
        """Slot -> request, residency and the token sampled last: the device's own memory."""
        self._held: tuple[list[Bound], list[Sampled]] | None = None
        """Rows to sample once their masks are known, and where the tokens go."""
        self._in_flight: deque[tuple[float, Collected]] = deque()

    def submit(self, plan: StepPlan) -> None:
        if self.submit_error is not None:
            error, self.submit_error = self.submit_error, None
            raise error
        self._check_plan(plan)
        self.plans.append(plan)
        rows = [self._bind(row) for row in plan.rows]
        # Three passes, since a row may read what another row of the same step computes.
        for bound in rows:
            self._write(bound)
        for bound in rows:
            self._fold(bound)
        assert self._held is None, "a step that was never told how to sample"
        brought = Collected([], [self._read(bound) for bound in rows if bound.row.read])
        sampling = [bound for bound in rows if bound.row.sample]
        if plan.constrained:
            self._held = sampling, brought.sampled
        else:
            brought.sampled.extend(self._sample(bound, None) for bound in sampling)
        self._free_at = max(self._free_at, self._clock()) + plan.num_tokens * self._seconds_per_token
        self._in_flight.append((self._free_at, brought))

    def choose(self, masks: Sequence[NDArray[np.int32] | None]) -> None:
        assert self._held is not None, "nothing waits for masks"
        (rows, sampled), self._held = self._held, None
        if self.choose_error is not None:
            error, self.choose_error = self.choose_error, None
            raise error
        sampled += [self._sample(bound, mask) for bound, mask in zip(rows, masks, strict=True)]

    def collect(self) -> Collected:
        done_at, brought = self._in_flight.popleft()
        self._clock.now = max(self._clock.now, done_at)
        if self.collect_error is not None:
            error, self.collect_error = self.collect_error, None
            raise error
        return brought

    def reset(self) -> None:
        self.resets += 1
        self._start_empty()

    def computed(self, request: Request) -> list[int]:
        """The positions that were computed for a request, in order of computation."""
        rows = [row for plan in self.plans for row in plan.rows if row.request is request]
        return [position for row in rows for position in range(row.start, row.start + row.count)]

    def read_page(self, page: int) -> list[Cell | None]:
        """What a page holds after all steps submitted so far."""
        return [self._cells.get((page, offset)) for offset in range(self.page_size)]

    def write_page(self, page: int, cells: Sequence[Cell | None]) -> None:
        """Puts a copy of a page's contents into place, before the next step."""
        for offset, cell in enumerate(cells):
            if cell is None:
                self._cells.pop((page, offset), None)
            else:
                self._cells[page, offset] = cell

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.rows, "an empty plan"
        assert all(row.count > 1 for row in plan.chunks), "a chunk of one token"
        assert all(row.count == 1 for row in plan.decodes), "a decode of several tokens"
        assert all(row.request.status is Status.RUNNING for row in plan.rows), "a row of one who does not run"
        slots = [row.request.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), "two rows share a slot"

    def _bind(self, row: Row) -> Bound:
        request, end = row.request, row.start + row.count
        assert request.lease is not None
        pages = list(request.lease.pages)
        assert len(pages) * self.page_size >= end, "the page table is too short"
        assert all(0 <= page < self._num_pages for page in pages), "a page out of range"
        tokens = list(request.tokens[row.start : end])
        if len(tokens) < row.count:
            owner, residency, token = self._last[request.slot]
            assert owner is request, "the slot's last token is another request's"
            assert residency == request.residency, "the slot's last token is of an earlier residency"
            tokens.append(token)
        assert len(tokens) == row.count, "a token that neither host nor device knows"
        return Bound(row, request.slot, request.residency, pages, tokens)

    def _cell(self, bound: Bound, position: int) -> tuple[int, int]:
        return bound.pages[position // self.page_size], position % self.page_size

    def _write(self, bound: Bound) -> None:
        for position, token in enumerate(bound.tokens, bound.row.start):
            place = self._cell(bound, position)
            self._cells[place] = Cell(bound.row.request.namespace, position, token, -1)

    def _fold(self, bound: Bound) -> None:
        history = 0
        for position in range(bound.row.start + bound.row.count):
            place = self._cell(bound, position)
            cell = self._cells[place]
            history = fold(history, cell.token)
            if position >= bound.row.start:
                assert cell.history in (-1, history), "two rows of a step write to one place"
                self._cells[place] = cell._replace(history=history)

    def _sample(self, bound: Bound, mask: NDArray[np.int32] | None) -> Sampled:
        request, end = bound.row.request, bound.row.start + bound.row.count
        history = 0
        for position in range(end):
            cell = self._cells[self._cell(bound, position)]
            history = fold(history, cell.token)
            assert cell.position == position, f"position {position} reads the KV of position {cell.position}"
            assert cell.namespace == request.namespace, "KV of another tenant"
            assert cell.history == history, "KV that was computed after other tokens"
        token = allowed(self._model(history, request.seed, end), mask)
        self._last[bound.slot] = (request, bound.residency, token)
        return Sampled(token, -1.0, ((token, -1.0),))

    def _read(self, bound: Bound) -> ReadPart:
        """What the positions say of the next token, or their sum; only those that this very row computes."""
        row, request = bound.row, bound.row.request
        histories = [self._cells[self._cell(bound, position)].history for position in row.read]
        assert row.start <= row.read.start, "read, but not computed"
        assert row.read.stop <= row.start + row.count, "read, but not computed"
        if isinstance(request.reading, MeanHidden):
            return HiddenSum(
                len(row.read), np.asarray([sum(map(_small, histories)), len(row.read)], np.float64)
            )
        return [
            fake_score(history, request.tokens[position + 1])
            for position, history in zip(row.read, histories, strict=True)
        ]


def fake_score(history: int, token: int) -> TokenLogprob:
    """The log-prob of a token after a history, out of thin air."""
    return TokenLogprob(token, -float(fold(history, token) % 1000), ((token, -0.5),), 1)


def _small(history: int) -> int:
    """What a hidden state adds to a sum: floats hold it exactly."""
    return history % 1009


def expected_reading(request: Request) -> list[TokenLogprob] | list[float]:
    """What a request's reading must hold in the end."""
    histories, history = [], 0
    for token in request.tokens[: request.num_prompt]:
        history = fold(history, token)
        histories.append(history)
    if isinstance(request.reading, MeanHidden):
        return [float(sum(map(_small, histories))), float(len(histories))]
    scores = [
        fake_score(h, t) for h, t in zip(histories, request.tokens[1 : request.num_prompt], strict=False)
    ]
    return scores[0 if request.reading is None else request.reading.first :]
