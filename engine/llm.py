"""The offline face: prompts in, outputs out, in the caller's thread and in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

from tqdm import tqdm

from .chat_template import TemplateError
from .config import EngineConfig
from .engine import Engine
from .prefetch_policy import PrefetchPolicy
from .request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from .thread import BLOCKED_WAIT, DRAIN_TIMEOUT
from .validate import ParameterError, check_messages, check_sampling

Prompt = str | Sequence[int]
"""Text, or token ids."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages with a role and a content."""
Progress = bool | type[tqdm]
"""True: a bar where stderr is a terminal; a tqdm class (`tqdm.notebook.tqdm`): that one, always; False: none."""

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
        ended = delta.finish_reason == "stop" and delta.token_ids[-1] in delta.request.stop_ids
        self.token_ids += delta.token_ids[:-1] if ended else delta.token_ids
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        if self.logprobs is not None:
            self.logprobs += delta.logprobs


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


class LLM:
    """A model for batch scripts: `LLM("demo").generate(["…"], SamplingParams(max_tokens=64))`.

    A mistake in one item becomes that item's `Output.error`; a mistake in what all items share raises. One call runs
    at a time, a second thread waits for its turn.
    """

    def __init__(
        self, model: str | os.PathLike[str] | EngineConfig, *, use_tqdm: bool = True, **options: Any
    ) -> None:
        """Loads the model and compiles its programs.

        `model` is a path, `demo`, or a whole config; `options` are `EngineConfig`'s fields. Raises `ConfigError`,
        `ModelError` or `TokenizerError` for what cannot be used.
        """
        if isinstance(model, EngineConfig):
            if options:
                raise TypeError(
                    f"with an EngineConfig no options are taken: put {', '.join(options)} into the config"
                )
            config = model
        else:
            config = EngineConfig.create(os.fspath(model), **options)
        self._turn = threading.Lock()
        self._calls = 0
        self._engine: Engine | None = Engine(config)
        bar = partial(
            tqdm,
            desc="preparing step programs",
            unit="program",
            total=self._engine.num_programs,
            disable=None if use_tqdm else True,
        )
        self._engine.warm_up(bar)

    @property
    def engine(self) -> Engine:
        """The engine beneath: tokenizer, statistics, loop. Raises RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def close(self) -> None:
        """Lets writes to the disk end, within a bound; lets go of the model and its memory. Closing again does nothing."""
        with self._turn:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefetch_policy: str | None = None,
        use_tqdm: Progress = True,
    ) -> list[Output]:
        """Completes each prompt: text (as it is, without a chat template) or token ids; a single one may come bare.

        `sampling_params` is one for all or one for each; `prefetch_policy` says how long prompts wait for the disk
        (None: as the engine's config does). Returns one output per prompt, in order.
        Raises `ParameterError` for parameters for all that are out of range, and for a wrong number of them.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and all(type(p) is int for p in prompts))
        items = [prompts] if single else list(prompts)
        encoders = [partial(self._encode, item) for item in items]
        return self._run(encoders, sampling_params, prefetch_policy, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        prefetch_policy: str | None = None,
        use_tqdm: Progress = True,
    ) -> list[Output]:
        """Answers one conversation (a list of messages) or several (a list of such lists); else like `generate`.

        `continue_final_message` completes the last message instead of answering it, and needs
        `add_generation_prompt=False`. Raises `TemplateError` if the model has no chat template, and
        `ParameterError` for text in the place of messages.
        """
        if self.engine.chat_template is None:
            raise TemplateError("this model has no chat template; use generate")
        if isinstance(messages, (str, bytes)):
            raise ParameterError("messages", "messages must be a list of messages, or a list of such lists")
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        variables = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        items = [messages] if single else list(messages)
        encoders = [partial(self._encode_chat, item, variables) for item in items]
        return self._run(encoders, sampling_params, prefetch_policy, use_tqdm)

    def _encode(self, prompt: object) -> list[int]:
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_bos=tokenizer.add_bos)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            return list(prompt)
        raise ParameterError(
            "prompt", f"a prompt is text or a list of token ids, not {type(prompt).__name__}"
        )

    def _encode_chat(self, messages: Any, variables: Mapping[str, Any]) -> list[int]:
        check_messages(messages)
        template = self.engine.chat_template
        assert template is not None
        try:
            text = template.render(messages, **variables)
        except RecursionError:
            raise ParameterError("messages", "messages are nested too deeply") from None
        # The template writes the begin-of-text token itself where the model wants one.
        return self.engine.tokenizer.encode(text, add_bos=False)

    def _run(
        self,
        encoders: list[Callable[[], list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        prefetch_policy: str | None,
        use_tqdm: Progress,
    ) -> list[Output]:
        params = self._params_for(len(encoders), sampling_params)
        prefetch = _prefetch(prefetch_policy)
        # tqdm: disable=None means where stderr is no terminal.
        bar_class, hidden = (
            (tqdm, None if use_tqdm else True) if isinstance(use_tqdm, bool) else (use_tqdm, False)
        )
        with (
            self._turn,
            _held_interrupts() as interrupted,
            bar_class(total=len(encoders), unit="prompt", disable=hidden, miniters=0) as bar,
        ):
            self._calls += 1
            batch = _Batch(self.engine, f"llm-{self._calls}", bar, prefetch)
            return batch.run(encoders, params, interrupted)

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            shared = given or SamplingParams()
            check_sampling(shared, vocab_size=self.engine.model_config.vocab_size)
            return [shared] * count
        if len(given) != count:
            raise ParameterError(
                "sampling_params",
                f"sampling_params has {len(given)} entries for {count} prompts; give one, or one for each",
            )
        return list(given)


class _Batch:
    """One call's items on their way through the engine's loop."""

    def __init__(self, engine: Engine, name: str, bar: tqdm, prefetch: PrefetchPolicy | None) -> None:
        self._engine = engine
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
        params: Sequence[SamplingParams],
        interrupted: Callable[[], bool],
    ) -> list[Output]:
        """The outputs in order. However it is left, none of its requests stays in the loop."""
        loop = self._engine.loop
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
        loop, clock = self._engine.loop, self._engine.clock
        while loop.step():
            pass
        deadline = clock() + DRAIN_TIMEOUT
        while not loop.idle and clock() < deadline:
            if not loop.step():
                time.sleep(BLOCKED_WAIT)

    def _add(self, encode: Callable[[], list[int]], params: SamplingParams) -> None:
        ids: list[int] = []
        try:
            ids = encode()
            requests = self._make_requests(ids, params)
        except ValueError as error:
            self._outputs.append(Output(ids, [Choice(finish_reason="error")], error=str(error)))
            self._bar.update()
            return
        wanted = params.logprobs is not None
        output = Output(ids, [Choice(logprobs=[] if wanted else None) for _ in requests])
        self._outputs.append(output)
        for request, choice in zip(requests, output.choices, strict=True):
            self._open[request.id] = output, choice
            self._engine.loop.add(request)

    def _make_requests(self, ids: list[int], params: SamplingParams) -> list[Request]:
        if not isinstance(params, SamplingParams):
            raise ParameterError(
                "sampling_params", f"a SamplingParams is expected, not {type(params).__name__}"
            )
        request_id = f"{self._name}-{len(self._outputs)}"
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


def _prefetch(text: str | None) -> PrefetchPolicy | None:
    try:
        return None if text is None else PrefetchPolicy.parse(text)
    except ValueError as error:
        raise ParameterError("prefetch_policy", str(error)) from None


@contextmanager
def _held_interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag instead of raising, so that no step is left half done; pressed again it raises.

    Yields the flag's reader. Does nothing outside the main thread, or where a program handles the signal itself.
    """
    came = threading.Event()

    def hold(number: int, frame: FrameType | None) -> None:
        if came.is_set():
            signal.default_int_handler(number, frame)
        came.set()

    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours:
        yield came.is_set
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
