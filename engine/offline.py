"""Prompts of one offline call on their way through the engine's loop, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .engine import Engine
from .prefetch_policy import PrefetchPolicy
from .reading import MeanHidden, PromptScores
from .replica_loop import Loop
from .request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from .thread import BLOCKED_WAIT, DRAIN_TIMEOUT
from .validate import ParameterError

WINDOW = 256
"""Choices handed to the engine's loop at a time; more would only be waiting there."""


@dataclass(slots=True)
class Choice:
    """One answer to a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Without the end token that may have ended the answer."""
    finish_reason: FinishReason | None = None
    """`stop`, `length`, or `error`."""
    logprobs: list[TokenLogprob] | None = None
    """One per token of `token_ids`, if they were asked for."""

    def add(self, delta: Delta) -> None:
        """Appends what a step brought."""
        ended = delta.finish_reason == "stop" and not delta.request.stop_ids.isdisjoint(delta.token_ids[-1:])
        kept = delta.token_ids[:-1] if ended else delta.token_ids
        self.token_ids += kept
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        if self.logprobs is not None:
            self.logprobs += delta.logprobs[: len(kept)]


@dataclass(slots=True)
class Output:
    """What became of one prompt. `text`, `token_ids`, `logprobs` and `finish_reason` are those of the first choice."""

    prompt_token_ids: list[int]
    """Empty when the prompt could not be turned into tokens."""
    choices: list[Choice]
    """As many as `SamplingParams.n`; a single empty one if the item was refused."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed for this prompt."""
    cached_by_tier: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("device", "host", "disk"), 0)
    )
    """`cached_tokens` by where the pages were when the prompt arrived."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token, if they were asked for; None for the first, which nothing comes before, and for those before
    `prompt_logprobs_start`."""
    embedding: NDArray[np.float32] | None = None
    """The mean of the prompt's last hidden states, scaled to length 1; of `LLM.embed` only."""
    error: str | None = None
    """Why there is no (whole) answer; None when all went well."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason


class Embed:
    """In the place of sampling parameters: an embedding is wanted."""


class Batch:
    """One call's items on their way through the engine's loop."""

    def __init__(
        self, engine: Engine, loop: Loop, name: str, bar: tqdm, prefetch: PrefetchPolicy | None
    ) -> None:
        """engine: makes requests; loop: runs them."""
        self._engine = engine
        self._loop = loop
        self._name = name
        self._bar = bar
        self._prefetch = prefetch
        self._outputs: list[Output] = []
        self._open: dict[str, tuple[Output, Choice]] = {}
        self._started = engine.clock()
        self._prompt_tokens = self._cached_tokens = self._tokens = 0

    def run(
        self,
        encoders: Sequence[Callable[[], list[int]]],
        params: Sequence[SamplingParams | Embed],
        interrupted: Callable[[], bool],
    ) -> list[Output]:
        """The outputs in order. However it is left, none of its requests stays in the loop."""
        loop = self._loop
        items = zip(encoders, params, strict=True)
        more = True
        try:
            while more or self._open:
                while more and len(self._open) < WINDOW:
                    item = next(items, None)
                    more = item is not None
                    if item is not None:
                        self._add(*item)
                if not loop.idle and not loop.step():
                    time.sleep(BLOCKED_WAIT)
                self._show()
                if interrupted():
                    raise KeyboardInterrupt
        finally:
            for request_id in list(self._open):
                loop.abort(request_id)
            self._wind_up()
        return self._outputs

    def _wind_up(self) -> None:
        """Lets the device end what it has begun, and the disk its writes: a script need not close its LLM to keep them.

        That has a bound, since a disk may have stalled.
        """
        loop, clock = self._loop, self._engine.clock
        while loop.step():
            pass
        deadline = clock() + DRAIN_TIMEOUT
        while not loop.idle and clock() < deadline:
            if not loop.step():
                time.sleep(BLOCKED_WAIT)

    def _add(self, encode: Callable[[], list[int]], params: SamplingParams | Embed) -> None:
        ids: list[int] = []
        try:
            ids = encode()
            requests = self._make_requests(ids, params)
        except ValueError as error:
            self._outputs.append(Output(ids, [Choice(finish_reason="error")], error=str(error)))
            self._bar.update()
            return
        wanted = isinstance(params, SamplingParams) and params.logprobs is not None
        output = Output(ids, [Choice(logprobs=[] if wanted else None) for _ in requests])
        self._outputs.append(output)
        for request, choice in zip(requests, output.choices, strict=True):
            self._open[request.id] = output, choice
            self._loop.add(request)

    def _make_requests(self, ids: list[int], params: SamplingParams | Embed) -> list[Request]:
        request_id = f"{self._name}-{len(self._outputs)}"
        if isinstance(params, Embed):
            return [self._engine.make_embedding(ids, request_id=request_id, on_delta=self._on_delta)]
        if not isinstance(params, SamplingParams):
            raise ParameterError(
                "sampling_params", f"a SamplingParams is expected, not {type(params).__name__}"
            )
        return self._engine.make_requests(
            ids, params, request_id=request_id, prefetch=self._prefetch, on_delta=self._on_delta
        )

    def _on_delta(self, delta: Delta) -> None:
        request = delta.request
        output, choice = self._open[request.id]
        choice.add(delta)
        self._tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return
        del self._open[request.id]
        output.error = output.error or delta.error
        if choice is output.choices[0]:
            _take_reading(output, request)
            output.cached_tokens = request.cached_tokens
            output.cached_by_tier = request.cached_by_tier
            self._prompt_tokens += request.num_prompt
            self._cached_tokens += request.cached_tokens
        if delta.finish_reason != "abort" and all(c.finish_reason is not None for c in output.choices):
            self._bar.update()

    def _show(self) -> None:
        """Output tokens per second and the cached share of the finished prompts, beside the bar."""
        seconds = self._engine.clock() - self._started
        rate = self._tokens / seconds if seconds > 0 else 0.0
        cached = self._cached_tokens / max(1, self._prompt_tokens)
        self._bar.set_postfix_str(f"{rate:.1f} tok/s, {cached:.0%} cached", refresh=False)
        self._bar.update(0)


def _take_reading(output: Output, request: Request) -> None:
    reading = request.reading
    if reading is None or reading.done < reading.total:
        return
    match reading:
        case PromptScores():
            output.prompt_logprobs = [*[None] * (reading.first + 1), *reading.logprobs]
        case MeanHidden():
            output.embedding = reading.embedding
