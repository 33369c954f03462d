"""A device that takes time and computes nothing: it answers with the tokens that the trace has, or with made-up ones."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from ..engine.plan import Collected, Sampled, StepPlan
from ..engine.request import Request
from .clock import SimClock
from .cost import StepCost


class SimExecutor:
    """Implements `plan.Executor`."""

    def __init__(self, cost: StepCost, clock: SimClock) -> None:
        self.busy_seconds = 0.0
        self._cost = cost
        self._clock = clock
        self._free_at = 0.0
        self._in_flight: deque[tuple[float, Collected]] = deque()
        self._answers: dict[Request, tuple[array[int], Sampled]] = {}
        """What is known of each output, and the token that stands for what is not."""
        self._next_made_up = -1
        self.ending: list[Request] = []
        """Requests whose last token has been computed, or is in flight."""

    def expect(self, request: Request, answer: array[int]) -> None:
        """What the request's output is, as far as that is known; beyond, it is tokens that nobody else has."""
        self._answers[request] = answer, Sampled(self._next_made_up, 0.0)
        self._next_made_up -= 1

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.ending.remove(request)
        del self._answers[request]

    def submit(self, plan: StepPlan) -> None:
        sampled = []
        answers = self._answers
        for row in plan.sampling:
            request, end = row.request, row.start + row.count
            if end + 1 == request.max_total:
                self.ending.append(request)
            answer, made_up = answers[request]
            at = end - request.num_prompt
            sampled.append(Sampled(answer[at], 0.0) if at < len(answer) else made_up)
        # The engine's thread prepares a step before the device has it; meanwhile the device does the step before.
        self._clock.now += self._cost.host_seconds(plan)
        seconds = self._cost.device_seconds(plan)
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self._in_flight.append((self._free_at, Collected(sampled, [])))

    def choose(self, masks: Sequence[object]) -> None:
        raise AssertionError("no request of a trace has a constraint")

    def collect(self) -> Collected:
        done_at, brought = self._in_flight.popleft()
        self._clock.wait_until(done_at)
        return brought

    def reset(self) -> None:
        self._in_flight.clear()
