"""The executor on a real device: owns parameters, page pool and sampler state, and runs steps in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from ..cache.device_pool import DevicePool
from ..models.transformer import Params
from .plan import Collected, Row, Sampled, StepPlan
from .prompt_reader import Pending, PromptReader
from .request import Request
from .sampler import SampleOutput
from .sampler_rows import pack_rows
from .sampler_state import SamplerState, init_state, prepare_slot, warm_up_state
from .step import StepFunctions, StepShapes, bucket_of


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight."""

    rows: tuple[Row, ...]
    output: SampleOutput | None
    read: Pending | None


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

    def submit(self, plan: StepPlan) -> None:
        sampling = [row for row in plan.rows if row.sample]
        for row in sampling:
            self._prepare(row.request)
        vector, table = self._shapes.pack(plan.chunks, plan.decodes)
        tokens = bucket_of(plan.num_tokens, self._shapes.token_buckets)
        kept, hidden = self._forward(vector, table, tokens)
        output = self._sample(kept, sampling) if sampling else None
        read = None
        if any(row.read for row in plan.rows):
            read = self._reader.start(self._params, hidden, plan.rows)
        self._in_flight.append(_Step(plan.rows, output, read))

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
        """Compiles every program that serving can need, by running each once on nothing; yields after each."""
        self._state = warm_up_state(self._state)
        kept = hidden = None
        for tokens in self._shapes.token_buckets:
            kept, hidden = self._forward(*self._shapes.pack_empty(tokens), tokens)
            jax.block_until_ready(self._reader.warm_up_take(hidden))
            yield
        assert kept is not None
        assert hidden is not None
        self._reader.warm_up(self._params, hidden)
        for rows in self._shapes.row_buckets:
            jax.block_until_ready(self._sample_padded(kept, [], rows))
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
        kept, hidden, self._pool.array = self._functions.forward(
            self._params, self._pool.array, self._state.last_tokens, vector, table, tokens=tokens
        )
        return kept, hidden

    def _sample(self, hidden: jax.Array, rows: list[Row]) -> SampleOutput:
        return self._sample_padded(hidden, rows, bucket_of(len(rows), self._shapes.row_buckets))

    def _sample_padded(self, hidden: jax.Array, rows: list[Row], size: int) -> SampleOutput:
        samples = [(row.request, row.start + row.count) for row in rows]
        packed = pack_rows(samples, size, self._shapes.max_num_seqs)
        output, self._state = self._functions.sample(self._params, hidden, packed, self._state)
        return output


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
