"""Speed of an engine as its loop delivers it: decode, prefill, time to first token, and against the bare step."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from ..engine.llm import LLM
from ..engine.request import SamplingParams
from .bare_step import BareStep
from .bounds import Clock, ModelCost

SETTLING_STEPS = 3
"""Steps before the clock runs, so that the pipeline is full."""


@dataclass(frozen=True, slots=True)
class Series:
    """Repetitions of one measurement."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


class EngineSpeed:
    """Measures one LLM. Every prompt is random and new, so nothing hits the cache unless it is meant to."""

    def __init__(self, llm: LLM, clock: Clock, *, repeats: int, steps: int, seed: int = 0) -> None:
        """`steps`: decode steps per repetition."""
        self.engine = llm.engine
        self._clock = clock
        self._repeats = repeats
        self._steps = steps
        self._random = random.Random(seed)
        self._calls = 0

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids."""
        return self._random.choices(range(self.engine.model_config.vocab_size), k=tokens)

    def decode(self, batch: int, context: int) -> Series:
        """Tokens per second of `batch` sequences, each with about `context` tokens in mid-measurement."""
        return Series(tuple(self._decode_once(batch, context) for _ in range(self._repeats)))

    def decode_and_bare(self, batch: int, context: int) -> tuple[Series, Series]:
        """The engine's tokens per second and the bare step's, measured in turn."""
        with BareStep(self.engine, [self.prompt(context) for _ in range(batch)]) as bare:
            ours, theirs = [], []
            for _ in range(self._repeats):
                ours.append(self._decode_once(batch, context))
                bare.run(SETTLING_STEPS)
                started = self._clock()
                bare.run(self._steps)
                theirs.append(batch * self._steps / (self._clock() - started))
            return Series(tuple(ours)), Series(tuple(theirs))

    def prefill(self, tokens: int) -> Series:
        """Prompt tokens per second until the first token of one cold prompt is there."""
        seconds = [self._first_token(self.prompt(tokens))[0] for _ in range(self._repeats)]
        return Series(tuple(tokens / s for s in seconds))

    def first_token_again(self, tokens: int) -> tuple[Series, Series, int]:
        """Seconds to the first token of a cold prompt, of the same prompt again, and the second's cached tokens."""
        cold, again, cached = [], [], 0
        for _ in range(self._repeats):
            prompt = self.prompt(tokens)
            cold.append(self._first_token(prompt)[0])
            seconds, cached = self._first_token(prompt)
            again.append(seconds)
        return Series(tuple(cold)), Series(tuple(again)), cached

    def _decode_once(self, batch: int, context: int) -> float:
        loop = self.engine.loop
        length = max(1, context - self._steps // 2 - SETTLING_STEPS)
        slack = batch * length // self.engine.loop.scheduler.limits.max_num_batched_tokens + batch
        params = _greedy(self._steps + SETTLING_STEPS + slack + 8)
        requests = [request for _ in range(batch) for request in self._make(self.prompt(length), params)]
        for request in requests:
            loop.add(request)
        while min(request.num_output for request in requests) < SETTLING_STEPS:
            loop.step()
        before = sum(request.num_output for request in requests)
        started = self._clock()
        for _ in range(self._steps):
            loop.step()
        seconds = self._clock() - started
        tokens = sum(request.num_output for request in requests) - before
        for request in requests:
            loop.abort(request.id)
        self._drain()
        return tokens / seconds

    def _first_token(self, prompt: list[int]) -> tuple[float, int]:
        (request,) = self._make(prompt, _greedy(1))
        self.engine.loop.add(request)
        self._drain()
        assert request.first_token is not None
        return request.first_token - request.arrival, request.cached_tokens

    def _make(self, prompt: list[int], params: SamplingParams):
        self._calls += 1
        return self.engine.make_requests(prompt, params, request_id=f"bench-{self._calls}")

    def _drain(self) -> None:
        while not self.engine.loop.idle:
            self.engine.loop.step()


def model_cost(llm: LLM) -> ModelCost:
    """What a step of this engine's model must read and compute."""
    engine = llm.engine
    model = engine.model_config
    embed = model.vocab_size * model.hidden_size
    met = model.parameters_per_token()
    return ModelCost(
        # Of experts a step reads at least those of one token.
        weight_bytes=engine.weight_bytes * met // model.num_parameters(),
        kv_bytes_per_token=engine.page_bytes // engine.cache.page_size,
        matrix_parameters=met - embed * (1 if model.tie_embeddings else 2),
        head_parameters=embed,
        attention_flops_per_pair=4 * model.num_layers * model.num_heads * model.head_dim,
    )


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
