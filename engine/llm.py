"""The offline face: prompts in, outputs out, in the caller's thread and in order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

from tqdm import tqdm

from .chat_template import TemplateError
from .config import EngineConfig
from .engine import Engine
from .offline import Batch, Embed, Output
from .prefetch_policy import PrefetchPolicy
from .replica_loop import Loop, ReplicaLoop
from .replicas import Replicas, load_thread
from .request import SamplingParams
from .stats import EngineStats
from .validate import ParameterError, check_messages, check_sampling

Prompt = str | Sequence[int]
"""Text, or token ids."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages with a role and a content."""
Progress = bool | type[tqdm]
"""True: a bar where stderr is a terminal; a tqdm class (`tqdm.notebook.tqdm`): that one, always; False: none."""


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

        With a `process_id` above 0 it follows process 0 instead, which runs the same script, and ends this process (by
        SystemExit) when that one closes its LLM or ends.
        """
        if isinstance(model, EngineConfig):
            if options:
                raise TypeError(
                    f"with an EngineConfig no options are taken: put {', '.join(options)} into the config"
                )
            config = model
        else:
            config = EngineConfig.create(os.fspath(model), **options)
        if config.process_id:
            from .follower import follow

            raise SystemExit(follow(config))
        self._turn = threading.Lock()
        self._calls = 0
        thread = load_thread(config)
        self._replicas = thread if isinstance(thread, Replicas) else None
        self._engine: Engine | None = thread.engine
        self._loop: Loop = thread.engine.loop if self._replicas is None else ReplicaLoop(self._replicas)
        bar = partial(
            tqdm,
            desc="preparing step programs",
            unit="program",
            total=config.dp_size * self._engine.num_programs,
            disable=None if use_tqdm else True,
        )
        if self._replicas is None:
            self._engine.warm_up(bar)
        else:
            self._replicas.warm_up(bar)

    @property
    def engine(self) -> Engine:
        """The engine beneath: tokenizer, statistics, loop; with `dp_size` the first of them. Raises RuntimeError after
        `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def stats(self) -> EngineStats:
        """What the engine has counted, or all of `dp_size` together. Raises RuntimeError after `close`."""
        return self.engine.stats if self._replicas is None else self._replicas.stats

    def close(self) -> None:
        """Lets writes to the disk end, within a bound; lets go of the model and its memory. Closing again does nothing."""
        with self._turn:
            if self._replicas is not None:
                self._replicas.close()
            elif self._engine is not None:
                self._engine.close()
            self._engine = self._replicas = None

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
        encoders = self._encoders(prompts)
        params = self._params_for(len(encoders), sampling_params)
        return self._run(encoders, params, prefetch_policy, use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: Progress = True) -> list[Output]:
        """`Output.embedding` of each prompt: the mean of the model's last hidden states over the prompt's tokens, scaled
        to length 1. Prompts as for `generate`.

        A model that was not trained for embeddings gives ones of modest quality.
        """
        encoders = self._encoders(prompts)
        return self._run(encoders, [Embed()] * len(encoders), None, use_tqdm)

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
        params = self._params_for(len(encoders), sampling_params)
        return self._run(encoders, params, prefetch_policy, use_tqdm)

    def _encoders(self, prompts: Prompt | Sequence[Prompt]) -> list[Callable[[], list[int]]]:
        single = isinstance(prompts, str) or (len(prompts) > 0 and all(type(p) is int for p in prompts))
        items = [prompts] if single else list(prompts)
        return [partial(self._encode, item) for item in items]

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
        params: Sequence[SamplingParams | Embed],
        prefetch_policy: str | None,
        use_tqdm: Progress,
    ) -> list[Output]:
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
            batch = Batch(self.engine, self._loop, f"llm-{self._calls}", bar, prefetch)
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
