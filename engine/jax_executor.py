"""The executor on a real device: owns parameters, page pool and sampler state, and runs steps in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import jax
import numpy as np

from ..cache.device_pool import DevicePool
from ..models.transformer import Params
from .plan import Row, Sampled, StepPlan
from .request import Request
from .sampler import SampleOutput
from .sampler_rows import pack_rows
from .sampler_state import SamplerState, init_state, prepare_slot, warm_up_state
from .step import StepFunctions, StepShapes, bucket_of


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
        self._in_flight: deque[tuple[list[Row], SampleOutput | None]] = deque()

    def submit(self, plan: StepPlan) -> None:
        sampling = [row for row in plan.rows if row.sample]
        for row in sampling:
            self._prepare(row.request)
        vector, table = self._shapes.pack(plan.chunks, plan.decodes)
        tokens = bucket_of(plan.num_tokens, self._shapes.token_buckets)
        hidden = self._forward(vector, table, tokens)
        self._in_flight.append((sampling, self._sample(hidden, sampling) if sampling else None))

    def collect(self) -> list[Sampled]:
        rows, output = self._in_flight.popleft()
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

    def reset(self) -> None:
        self._in_flight.clear()
        self._prepared.clear()
        self._pool.reset()
        self._state = self._new_state()

    def warm_up(self) -> Iterator[None]:
        """Compiles every program that serving can need, by running each once on nothing; yields after each."""
        self._state = warm_up_state(self._state)
        hidden = None
        for tokens in self._shapes.token_buckets:
            hidden = self._forward(*self._shapes.pack_empty(tokens), tokens)
            jax.block_until_ready(hidden)
            yield
        assert hidden is not None
        for rows in self._shapes.row_buckets:
            jax.block_until_ready(self._sample_padded(hidden, [], rows))
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

    def _forward(self, vector: np.ndarray, table: np.ndarray, tokens: int) -> jax.Array:
        hidden, self._pool.array = self._functions.forward(
            self._params, self._pool.array, self._state.last_tokens, vector, table, tokens=tokens
        )
        return hidden

    def _sample(self, hidden: jax.Array, rows: list[Row]) -> SampleOutput:
        return self._sample_padded(hidden, rows, bucket_of(len(rows), self._shapes.row_buckets))

    def _sample_padded(self, hidden: jax.Array, rows: list[Row], size: int) -> SampleOutput:
        samples = [(row.request, row.start + row.count) for row in rows]
        packed = pack_rows(samples, size, self._shapes.max_num_seqs)
        output, self._state = self._functions.sample(self._params, hidden, packed, self._state)
        return output
