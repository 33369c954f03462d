"""Puts an engine together from a config: model, tokenizer, pool, executor and loop; and makes requests for it."""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..cache.manager import CacheManager
from ..models.source import ModelSource, resolve_model
from .chat_template import ChatTemplate
from .compile_counter import CompileCounter, use_compile_cache
from .config import ConfigError, EngineConfig
from .constraint import Constraint
from .device_side import DeviceSide
from .grammar import Compiled, GrammarCompiler
from .jax_executor import JaxExecutor
from .leader import Leader, join_processes
from .loop import EngineLoop
from .page_share import page_share
from .placement import place, place_replica
from .prefetch_policy import PrefetchPolicy
from .reading import MeanHidden, PromptScores, Reading
from .request import Delta, Request, SamplingParams
from .schedule_policy import SCHEDULE_POLICIES
from .stats import EngineStats
from .text import IncrementalText
from .tiers import build_tiers, host_pages, identity
from .tokenizer import Tokenizer
from .trace_recorder import TraceRecorder
from .validate import check_prompt, check_sampling, seed_for_choice

logger = logging.getLogger(__name__)


class Engine:
    """A loaded model that runs requests. Not thread safe, but for `make_requests` beside a running loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        first: Engine | None = None,
        replica: int = 0,
        clock: Callable[[], float] = time.monotonic,
        progress: bool = False,
        wrap_store: Callable[[Any], Any] = lambda store: store,
    ) -> None:
        """Loads the model and allocates the pools; compiles nothing yet. `wrap_store` may put something before the page
        store of the disk tier, for experiments.

        `replica`: which of `config.dp_size` this is. All but the first are made out of it: what has no place on a device
        they have in common, and parameters come from its devices. It is closed last.

        Raises `ConfigError`, `ModelError` or `TokenizerError` for what cannot be used.
        """
        if config.process_id:
            raise ConfigError(
                f"process_id: {config.process_id} only follows process 0; start it as an LLM, or with tierax serve, batch or generate"
            )
        join_processes(config)
        self._leader = leader = Leader(config) if config.num_processes > 1 else None
        self._source = source = first._source if first is not None else resolve_model(config.model_path)
        self.config = config
        self.clock = clock
        self.model_config = source.config
        self.model_name = config.model_name
        self.tokenizer = first.tokenizer if first is not None else load_tokenizer(source)
        self.chat_template = _chat_template(self.tokenizer)
        self.end_ids = source.eos_token_ids | self.tokenizer.eos_ids
        self._grammars = (
            first._grammars
            if first is not None
            else GrammarCompiler(self.tokenizer, source.config.vocab_size, self.end_ids)
        )
        self.stats = EngineStats()
        self._random = random.Random(config.seed)
        self._first = first
        # jax reports what the whole process compiles.
        self._compiles = first._compiles if first is not None else CompileCounter(self.stats)
        if (directory := config.compile_cache_path()) is not None:
            use_compile_cache(directory)

        placement = (
            place_replica(replica, config.dp_size, config.tp_size, source.config)
            if config.dp_size > 1
            else place(config.tp_size, source.config)
        )
        how: dict[str, Any] = {"progress": progress, "on_load": self._compiles.on_load}
        if first is not None:
            how["twin"] = first.device
        if leader is not None:
            how |= {"agree": leader.agree, "announce": leader.announce}
        self.device = device = DeviceSide(config, source, placement, **how)
        self.dtype, self.activations, self.kv_dtype = device.dtype, device.activations, device.kv_dtype
        self.context_length = device.context_length
        self.weight_bytes = device.weight_bytes
        """Of parameters, read by every step; an embedding table that is no output head is not."""
        self._pool = pool = device.pool
        self.page_bytes = pool.page_bytes
        page_size = pool.shape.page_size
        self.executor = JaxExecutor(device.steps, device.shapes)
        fields = identity(
            source, config, self.dtype, device.weight_form, self.activations, self.kv_dtype, page_size
        )
        self.cache = CacheManager(
            pool.shape.pages,
            page_size,
            config.make_eviction_policy(),
            enabled=not config.disable_radix_cache,
            host_pages=(
                first.cache.host.num_pages
                if first is not None
                else host_pages(config, device.platform, pool, device.shapes.table_width)
            ),
            host_policy=config.make_eviction_policy("host"),
            write_policy=config.write_policy,
            identity=fields,
            clock=clock,
        )
        self.tiers = None
        if self.cache.host.num_pages:
            self.tiers = build_tiers(
                config,
                self.cache,
                pool,
                fields,
                share=page_share(pool, placement, config.process_id),
                clock=clock,
                wrap_store=wrap_store,
                leader=leader,
            )
        self.recorder = first.recorder if first is not None else None
        if config.trace_out is not None and first is None:
            self.recorder = TraceRecorder(config.trace_out, page_size, clock)
        self.loop = EngineLoop(
            self.cache,
            self.executor,
            device.limits,
            SCHEDULE_POLICIES[config.schedule_policy](),
            clock=clock,
            transfers=self.tiers.transfers if self.tiers is not None else None,
            stats=self.stats,
            on_end=self.recorder.record if self.recorder is not None else lambda request: None,
        )

    def warm_up(
        self,
        progress: Callable[[Iterable[None]], Iterable[None]] = iter,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compiles all that serving can need, unless the config says to skip it; `stopped` can end it early.

        With several processes it returns when all of them are as far: a request that comes then finds nobody busy.
        """
        if not self.config.skip_warmup:
            self._make_programs(progress, stopped)
        if self._leader is not None and not stopped():
            self._leader.meet()

    def _make_programs(
        self, progress: Callable[[Iterable[None]], Iterable[None]], stopped: Callable[[], bool]
    ) -> None:
        started = self.clock()
        self.stats.step_programs = self.num_programs
        for _ in progress(self._programs()):
            self.stats.warm_programs += 1
            if stopped():
                return
        logger.info(
            "%d step programs ready in %.1f s; %d programs compiled, %d loaded from the compile cache",
            self.num_programs,
            self.clock() - started,
            self.stats.compiles,
            self.stats.loaded_programs,
        )

    @property
    def num_programs(self) -> int:
        """Programs that warm-up compiles: of steps, and of copies between the tiers."""
        return self.executor.num_programs + (self._pool.num_programs if self.tiers is not None else 0)

    def _programs(self) -> Iterator[None]:
        yield from self.executor.warm_up()
        if self.tiers is not None:
            yield from self._pool.warm_up()

    def compile_constraint(self, constraint: Constraint) -> Compiled:
        """Compiles what `SamplingParams.constraint` asks for, so that `make_requests` finds it done. May take a second: to be
        called from any thread but the loop's. Raises `ConstraintError` for what cannot be enforced."""
        return self._grammars.compile(constraint)

    def make_requests(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        namespace: bytes = b"",
        priority: int = 0,
        prefetch: PrefetchPolicy | None = None,
        on_delta: Callable[[Delta], None] | None = None,
        continues: bool = False,
    ) -> list[Request]:
        """The `params.n` requests of one prompt, ids `request_id-0` and so on, ready for `loop.add`.

        `continues`: the text goes on from the prompt's, so a leading space of a word piece is kept.
        Raises `ParameterError` for anything out of range. Not to be called from two threads at once.
        """
        vocab = self.model_config.vocab_size
        check_sampling(params, vocab_size=vocab)
        max_total = check_prompt(
            prompt_ids,
            vocab_size=vocab,
            context_length=self.context_length,
            capacity_tokens=self.cache.capacity_tokens,
            params=params,
        )
        compiled = None if params.constraint is None else self.compile_constraint(params.constraint)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.end_ids

        def reading() -> Reading | None:
            top = params.prompt_logprobs
            if top is None:
                return None
            return PromptScores(len(prompt_ids) - 1, top, params.prompt_logprobs_start)

        return [
            Request(
                id=f"{request_id}-{index}",
                tokens=array("i", prompt_ids),
                num_prompt=len(prompt_ids),
                params=params,
                seed=seed_for_choice(seed, index),
                stop_ids=stop_ids,
                max_total=max_total,
                namespace=namespace,
                priority=priority,
                prefetch=prefetch,
                # A constrained text starts with what it starts with.
                text=IncrementalText.of(self.tokenizer, params, continues=continues or compiled is not None),
                matcher=None if compiled is None else compiled.matcher(stop_ids),
                reading=reading(),
                on_delta=on_delta,
            )
            for index in range(params.n)
        ]

    def make_embedding(
        self,
        prompt_ids: list[int],
        *,
        request_id: str,
        namespace: bytes = b"",
        priority: int = 0,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Request:
        """A request that generates nothing; once it has ended, its `reading` has the prompt's embedding.

        Raises `ParameterError` for a prompt that cannot be computed.
        """
        params = SamplingParams(max_tokens=0)
        max_total = check_prompt(
            prompt_ids,
            vocab_size=self.model_config.vocab_size,
            context_length=self.context_length,
            capacity_tokens=self.cache.capacity_tokens,
            params=params,
            param="input",
        )
        return Request(
            id=request_id,
            tokens=array("i", prompt_ids),
            num_prompt=len(prompt_ids),
            params=params,
            seed=0,
            stop_ids=frozenset(),
            max_total=max_total,
            namespace=namespace,
            priority=priority,
            reading=MeanHidden(len(prompt_ids)),
            on_delta=on_delta,
        )

    def close(self, drain_timeout: float = 10.0) -> None:
        """Lets writes to the disk end within `drain_timeout` seconds, and lets go of process-wide hooks; of no use
        afterwards."""
        if self.tiers is not None:
            self.tiers.close(drain_timeout)
        if self._leader is not None:
            self.device.steps.wait()
            self._leader.close()
        if self._first is not None:
            return
        if self.recorder is not None:
            self.recorder.close()
        self._compiles.close()


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that belongs to a model. Raises `TokenizerError`."""
    return Tokenizer.from_gguf(source.raw) if source.kind == "gguf" else Tokenizer.from_hf_dir(source.path)


def _chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    tool_use = tokenizer.chat_templates.get("tool_use")
    source = tokenizer.chat_template or tool_use
    if source is None:
        return None
    return ChatTemplate(source, tokenizer.bos_token or "", tokenizer.eos_token or "", tool_use=tool_use)
