"""The executor on a real device: turns plans into the device's commands, and what comes of them into tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .plan import Collected, Row, Sampled, StepPlan
from .prompt_reader import Pending, PromptReader
from .request import Request
from .sampler import SampleOutput
from .sampler_rows import MASK, SamplingRows, pack_rows
from .sampler_state import slot_updates, warm_up_updates
from .step import StepShapes, bucket_of
from .step_device import StepDevice

if TYPE_CHECKING:
    from .plan import Mask


@dataclass(slots=True)
class _Step:
    """A step in flight."""

    rows: tuple[Row, ...]
    output: SampleOutput | None = None
    read: Pending | None = None
    held: SamplingRows | None = None
    """What is sampled, until `choose` says how."""


class JaxExecutor:
    """Implements `plan.Executor`. Dispatch is asynchronous: `submit` returns while the device works."""

    def __init__(self, device: StepDevice, shapes: StepShapes) -> None:
        self._device = device
        self._shapes = shapes
        self._prepared: dict[int, tuple[Request, int]] = {}
        """Slot -> request and residency that its device state was set up for."""
        self._reader = PromptReader(device, device.vocab_size, shapes.max_num_seqs)
        self._in_flight: deque[_Step] = deque()

    def submit(self, plan: StepPlan) -> None:
        step = _Step(plan.rows)
        sampling = plan.sampling
        for row in sampling:
            self._prepare(row.request)
        vector, table = self._shapes.pack(plan.chunks, plan.decodes)
        tokens = bucket_of(plan.num_tokens, self._shapes.token_buckets)
        self._device.forward(vector, table, tokens)
        if sampling:
            # Packed now: by the time of `choose` a request may have ended and have no slot any more.
            packed = self._pack(sampling, bucket_of(len(sampling), self._shapes.row_buckets))
            if plan.constrained:
                step.held = packed
            else:
                step.output = self._device.sample(packed, None)
        if any(row.read for row in plan.rows):
            step.read = self._reader.start(plan.rows, tokens)
        self._in_flight.append(step)

    def choose(self, masks: Sequence[Mask | None]) -> None:
        step = self._in_flight[-1]
        assert step.held is not None
        packed, step.held = step.held, None
        # A new array for each step: on a CPU the device reads this very memory, and later.
        mask = np.zeros((len(packed.flags), self._device.mask_width), np.int32)
        for row, allowed in enumerate(masks):
            if allowed is not None:
                mask[row] = allowed
                packed.flags[row] |= MASK  # pyright: ignore[reportIndexIssue]
        step.output = self._device.sample(packed, mask)

    def collect(self) -> Collected:
        step = self._in_flight.popleft()
        sampled = _sampled(step.output, [row for row in step.rows if row.sample])
        return Collected(sampled, [] if step.read is None else self._reader.finish(step.read, step.rows))

    def reset(self) -> None:
        self._in_flight.clear()
        self._prepared.clear()
        self._device.reset()

    def warm_up(self) -> Iterator[None]:
        """Makes every program that serving can need; yields after each.

        Only the smallest forward is run, to see what its results are like: a long step on nothing takes as long as one on
        something.
        """
        device, shapes = self._device, self._shapes
        for update in warm_up_updates(shapes.max_num_seqs):
            device.update(*update)
        smallest = shapes.token_buckets[0]
        device.forward(*shapes.pack_empty(smallest), smallest)
        for tokens in shapes.token_buckets:
            device.prepare_forward(*shapes.pack_empty(tokens), tokens)
            self._reader.prepare_take(tokens)
            yield
        self._reader.prepare()
        for rows in shapes.row_buckets:
            # Masks are data: those of a step come from the host, those that allow everything stay on the device.
            device.prepare_sample(self._pack([], rows))
            yield

    @property
    def num_programs(self) -> int:
        """Step programs that warm-up makes."""
        return len(self._shapes.token_buckets) + len(self._shapes.row_buckets)

    def _prepare(self, request: Request) -> None:
        # Not by id, which a later request may have again.
        key = (request, request.residency)
        if self._prepared.get(request.slot) != key:
            self._prepared[request.slot] = key
            for update in slot_updates(request, self._device.vocab_size):
                self._device.update(*update)

    def _pack(self, rows: Sequence[Row], size: int) -> SamplingRows:
        samples = [(row.request, row.start + row.count) for row in rows]
        return pack_rows(samples, size, self._shapes.max_num_seqs)


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
