"""The executor without the loop: one fixed plan of decodes, submitted over and over; what the loop is held against."""

from __future__ import annotations

from array import array
from types import TracebackType
from typing import Self

from ..cache.leases import Lease
from ..engine.engine import Engine
from ..engine.plan import Row, StepPlan
from ..engine.request import Request, SamplingParams


class BareStep:
    """Prefills some prompts, each in a slot of its own, then decodes their next token as often as one likes.

    The engine must be idle when this is made, and not be short of pages while it is open.
    """

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self._engine = engine
        self._executor = engine.executor
        self._leases: list[Lease] = []
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        requests: list[Request] = []
        for slot, prompt in enumerate(prompts):
            (request,) = engine.make_requests(prompt, params, request_id=f"bare-{slot}")
            request.slot, request.residency = slot, 1
            lease = engine.cache.open(b"", array("i", prompt), 0)
            self._leases.append(lease)
            if not engine.cache.grow(lease, len(prompt) + 1):
                self.close()
                raise ValueError(
                    f"{len(prompts)} prompts of {len(prompt)} tokens do not fit into the page pool"
                )
            request.lease = lease
            self._prefill(request)
            requests.append(request)
        rows = tuple(Row(request, request.num_prompt, 1, sample=True) for request in requests)
        self._plan = StepPlan(0, chunks=(), decodes=rows)

    def run(self, steps: int) -> None:
        """Runs the plan `steps` times, one step ahead of what is collected, as the loop does."""
        self._executor.submit(self._plan)
        for _ in range(steps - 1):
            self._executor.submit(self._plan)
            self._executor.collect()
        self._executor.collect()

    def close(self) -> None:
        """Gives the pages back."""
        while self._leases:
            self._engine.cache.release(self._leases.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefill(self, request: Request) -> None:
        budget = self._engine.loop.scheduler.limits.max_num_batched_tokens
        for start in range(0, request.num_prompt, budget):
            count = min(budget, request.num_prompt - start)
            row = Row(request, start, count, sample=start + count == request.num_prompt)
            rows = (row,)
            plan = StepPlan(0, chunks=rows if count > 1 else (), decodes=rows if count == 1 else ())
            self._executor.submit(plan)
            self._executor.collect()
