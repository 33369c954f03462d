"""The executor on a real device: owns parameters, page pool and sampler state, and runs steps in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..cache.device_pool import DevicePool
from ..models.transformer import Params
from .plan import Collected, Row, Sampled, StepPlan
from .programs import like
from .prompt_reader import Pending, PromptReader
from .request import Request
from .sampler import SampleOutput
from .sampler_rows import MASK, SamplingRows, pack_rows
from .sampler_state import SamplerState, init_state, prepare_slot, warm_up_state
from .step import StepFunctions, StepShapes, bucket_of

if TYPE_CHECKING:
    from .plan import Mask


@dataclass(slots=True)
class _Step:
    """A step in flight."""

    rows: tuple[Row, ...]
    output: SampleOutput | None = None
    read: Pending | None = None
    held: tuple[jax.Array, SamplingRows] | None = None
    """What is sampled from, until `choose` says how."""


class JaxExecutor:
    """Implements `plan.Executor`. Dispatch is asynchronous: `submit` returns while the device works."""

    def __init__(
        self, params: Params, pool: DevicePool, functions: StepFunctions, shapes: StepShapes, vocab_size: int
    ) -> None:
        self._params = params
        self._pool = pool
        self._functions = functions
        self._shapes = shapes
        self._vocab_size = vocab_size
        self._state = self._new_state()
        self._prepared: dict[int, tuple[Request, int]] = {}
        """Slot -> request and residency that its device state was set up for."""
        self._reader = PromptReader(functions, vocab_size, shapes.max_num_seqs)
        self._in_flight: deque[_Step] = deque()
        self._no_masks: dict[int, jax.Array] = {}
        """Row bucket -> masks on the device that allow everything."""

    def submit(self, plan: StepPlan) -> None:
        step = _Step(plan.rows)
        sampling = plan.sampling
        for row in sampling:
            self._prepare(row.request)
        vector, table = self._shapes.pack(plan.chunks, plan.decodes)
        tokens = bucket_of(plan.num_tokens, self._shapes.token_buckets)
        kept, hidden = self._forward(vector, table, tokens)
        if sampling:
            # Packed now: by the time of `choose` a request may have ended and have no slot any more.
            packed = self._pack(sampling, bucket_of(len(sampling), self._shapes.row_buckets))
            if plan.constrained:
                step.held = kept, packed
            else:
                step.output = self._sample(kept, packed)
        if any(row.read for row in plan.rows):
            step.read = self._reader.start(self._params, hidden, plan.rows)
        self._in_flight.append(step)

    def choose(self, masks: Sequence[Mask | None]) -> None:
        step = self._in_flight[-1]
        assert step.held is not None
        (kept, packed), step.held = step.held, None
        # A new array for each step: on a CPU the device reads this very memory, and later.
        mask = np.zeros((len(packed.flags), self._mask_width), np.int32)
        for row, allowed in enumerate(masks):
            if allowed is not None:
                mask[row] = allowed
                packed.flags[row] |= MASK  # pyright: ignore[reportIndexIssue]
        step.output = self._sample(kept, packed, mask)

    def collect(self) -> Collected:
        step = self._in_flight.popleft()
        sampled = _sampled(step.output, [row for row in step.rows if row.sample])
        return Collected(sampled, [] if step.read is None else self._reader.finish(step.read, step.rows))

    def reset(self) -> None:
        self._in_flight.clear()
        self._prepared.clear()
        self._pool.reset()
        self._state = self._new_state()

    def warm_up(self) -> Iterator[None]:
        """Makes every program that serving can need; yields after each.

        Only the smallest forward is run, to see what its results are like: a long step on nothing takes as long as one on
        something.
        """
        self._state = warm_up_state(self._state)
        smallest = self._shapes.token_buckets[0]
        kept, hidden = self._forward(*self._shapes.pack_empty(smallest), smallest)
        for tokens in self._shapes.token_buckets:
            inputs = self._inputs(*self._shapes.pack_empty(tokens))
            self._functions.forward.prepare(*inputs, tokens=tokens)
            self._reader.prepare_take(like(hidden, tokens))
            yield
        self._reader.prepare(self._params, hidden)
        for rows in self._shapes.row_buckets:
            # Masks are data: those of a step come from the host, those that allow everything stay on the device.
            packed, mask = self._pack([], rows), self._no_mask(rows)
            self._functions.sample.prepare(self._params, kept, packed, self._state, mask)
            yield

    @property
    def num_programs(self) -> int:
        """Step programs that warm-up compiles."""
        return len(self._shapes.token_buckets) + len(self._shapes.row_buckets)

    def _new_state(self) -> SamplerState:
        state = init_state(self._shapes.max_num_seqs, self._vocab_size)
        layout = self._pool.layout
        # A pool with a layout is bound to its device, and so is what steps make of it: a state that was not bound at first
        # would have every program compiled twice.
        return state if layout is None else jax.device_put(state, layout.sharding)

    def _prepare(self, request: Request) -> None:
        # Not by id, which a later request may have again.
        key = (request, request.residency)
        if self._prepared.get(request.slot) != key:
            self._prepared[request.slot] = key
            self._state = prepare_slot(self._state, request)

    def _forward(self, vector: np.ndarray, table: np.ndarray, tokens: int) -> tuple[jax.Array, jax.Array]:
        inputs = self._inputs(vector, table)
        kept, hidden, self._pool.array = self._functions.forward(*inputs, tokens=tokens)
        return kept, hidden

    def _inputs(self, vector: np.ndarray, table: np.ndarray) -> tuple[Any, ...]:
        return self._params, self._pool.array, self._state.last_tokens, vector, table

    def _pack(self, rows: Sequence[Row], size: int) -> SamplingRows:
        samples = [(row.request, row.start + row.count) for row in rows]
        return pack_rows(samples, size, self._shapes.max_num_seqs)

    def _sample(
        self, hidden: jax.Array, packed: SamplingRows, mask: np.ndarray | None = None
    ) -> SampleOutput:
        masks = self._no_mask(len(packed.flags)) if mask is None else mask
        output, self._state = self._functions.sample(self._params, hidden, packed, self._state, masks)
        return output

    def _no_mask(self, size: int) -> jax.Array:
        if size not in self._no_masks:
            self._no_masks[size] = jax.device_put(np.zeros((size, self._mask_width), np.int32))
        return self._no_masks[size]

    @property
    def _mask_width(self) -> int:
        return -(-self._vocab_size // 32)


def _sampled(output: SampleOutput | None, rows: list[Row]) -> list[Sampled]:
    if output is None:
        return []
    tokens = np.asarray(output.tokens).tolist()
    logprobs: list[float] = [0.0] * len(rows)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
    if any(row.request.params.logprobs is not None for row in rows):
        logprobs = np.asarray(output.logprobs).tolist()
    if any(row.request.params.logprobs for row in rows):
        ids, values = np.asarray(output.top_ids).tolist(), np.asarray(output.top_logprobs).tolist()
        tops = [tuple(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]
    return [Sampled(tokens[i], logprobs[i], tops[i]) for i in range(len(rows))]
