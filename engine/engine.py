"""Puts an engine together from a config: model, tokenizer, pool, executor and loop; and makes requests for it."""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ..cache.device_pool import DevicePool
from ..cache.manager import CacheManager
from ..models.config import ModelConfig
from ..models.source import ModelSource, resolve_model
from ..models.transformer import Decoder, Params, attention_shape
from ..models.weights.loader import load_params
from ..pallas_kernels import attention
from ..pallas_kernels.kernels import Kernels, Target
from ..pallas_kernels.pages import PoolShape, page_bytes_on_device, pool_format
from .chat_template import ChatTemplate
from .compile_counter import CompileCounter, use_compile_cache
from .config import ConfigError, EngineConfig
from .constraint import Constraint
from .grammar import Compiled, GrammarCompiler
from .jax_executor import JaxExecutor
from .loop import EngineLoop
from .platform import PLATFORMS, Platform, compiler_options, device_memory, device_target, pool_pages
from .prefetch_policy import PrefetchPolicy
from .programs import ProgramStore
from .reading import MeanHidden, PromptScores, Reading
from .request import Delta, Request, SamplingParams
from .schedule_policy import SCHEDULE_POLICIES
from .scheduler import Limits
from .stats import EngineStats
from .step import StepFunctions, StepShapes
from .text import IncrementalText
from .tiers import build_tiers, host_pages, identity
from .tokenizer import Tokenizer
from .trace_recorder import TraceRecorder
from .validate import check_prompt, check_sampling, seed_for_choice

logger = logging.getLogger(__name__)

_JAX_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_POOL_DTYPES = _JAX_DTYPES | {"fp8": jnp.uint8}


class Engine:
    """A loaded model that runs requests. Not thread safe, but for `make_requests` beside a running loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        progress: bool = False,
        wrap_store: Callable[[Any], Any] = lambda store: store,
    ) -> None:
        """Loads the model and allocates the pools; compiles nothing yet. `wrap_store` may put something before the page
        store of the disk tier, for experiments.

        Raises `ConfigError`, `ModelError` or `TokenizerError` for what cannot be used.
        """
        platform = PLATFORMS.get(jax.default_backend(), PLATFORMS["default"])
        source = resolve_model(config.model_path)
        self.config = config
        self.clock = clock
        self.model_config = source.config
        self.model_name = config.model_name
        self.tokenizer = load_tokenizer(source)
        self.chat_template = _chat_template(self.tokenizer)
        self.context_length = _context_length(config, source)
        self.end_ids = source.eos_token_ids | self.tokenizer.eos_ids
        self._grammars = GrammarCompiler(self.tokenizer, source.config.vocab_size, self.end_ids)
        self.stats = EngineStats()
        self._random = random.Random(config.seed)
        self._compiles = CompileCounter(self.stats)
        if (directory := config.compile_cache_path()) is not None:
            use_compile_cache(directory)

        dtype = platform.dtype if config.dtype == "auto" else config.dtype
        activations = platform.activations or dtype
        kv_dtype = activations if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self.dtype, self.activations, self.kv_dtype = dtype, activations, kv_dtype
        params = load_params(
            source,
            source.config,
            dtype=dtype,
            quantization=config.quantization,
            stacked=platform.stacked,
            progress=progress,
        )
        limits = Limits(
            config.max_num_seqs or platform.max_num_seqs,
            config.max_num_batched_tokens or platform.max_num_batched_tokens,
        )
        self.weight_bytes = _bytes_per_step(params, source.config)
        """Of parameters, read by every step; an embedding table that is no output head is not."""
        target = device_target()
        pool = self._make_pool(config, platform, target, limits, _POOL_DTYPES[kv_dtype])
        page_size = pool.shape.page_size
        self._pool = pool
        self.page_bytes = pool.page_bytes
        shapes = StepShapes(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            table_width=-(-self.context_length // page_size),
            page_size=page_size,
            num_pages=pool.shape.pages,
        )
        decoder = Decoder(source.config, _JAX_DTYPES[activations], self._select_kernels(target, page_size))
        store = ProgramStore(
            None if directory is None else directory / "programs",
            (
                source.config,
                activations,
                decoder.kernels.summary,
                target,
                vars(shapes),
                pool.shape,
                pool.dtype,
            ),
            jax.local_devices()[:1],
            self._compiles.on_load,
        )
        functions = StepFunctions(decoder, shapes, pool.layout, compiler_options(target), store)
        self.executor = JaxExecutor(params, pool, functions, shapes, source.config.vocab_size)
        fields = identity(source, config, dtype, activations, kv_dtype, page_size)
        self.cache = CacheManager(
            pool.shape.pages,
            page_size,
            config.make_eviction_policy(),
            enabled=not config.disable_radix_cache,
            host_pages=host_pages(config, platform, pool, shapes.table_width),
            host_policy=config.make_eviction_policy("host"),
            write_policy=config.write_policy,
            identity=fields,
            clock=clock,
        )
        self.tiers = None
        if self.cache.host.num_pages:
            self.tiers = build_tiers(config, self.cache, pool, fields, clock=clock, wrap_store=wrap_store)
        self.recorder = None
        if config.trace_out is not None:
            self.recorder = TraceRecorder(config.trace_out, page_size, clock)
        self.loop = EngineLoop(
            self.cache,
            self.executor,
            limits,
            SCHEDULE_POLICIES[config.schedule_policy](),
            clock=clock,
            transfers=self.tiers.transfers if self.tiers is not None else None,
            stats=self.stats,
            on_end=self.recorder.record if self.recorder is not None else lambda request: None,
        )

    def _select_kernels(self, target: Target, page_size: int) -> Kernels:
        shape = attention_shape(self.model_config, page_size, self.activations, self.kv_dtype)
        try:
            kernels = attention.select(target, shape, self.config.attention_backend)
        except ValueError as error:
            raise ConfigError(f"attention_backend: {error}") from None
        logger.info("kernels on %s: %s", target.platform, kernels.summary)
        return kernels

    def warm_up(
        self,
        progress: Callable[[Iterable[None]], Iterable[None]] = iter,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compiles all that serving can need, unless the config says to skip it; `stopped` can end it early."""
        if self.config.skip_warmup:
            return
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
        if self.recorder is not None:
            self.recorder.close()
        self._compiles.close()

    def _make_pool(
        self, config: EngineConfig, platform: Platform, target: Target, limits: Limits, dtype: jnp.dtype
    ) -> DevicePool:
        model = self.model_config
        page_size = config.page_size or platform.page_size
        one = PoolShape(1, model.num_layers, page_size, model.num_kv_heads, model.head_dim)
        one = one._replace(quantized=dtype == jnp.uint8)
        layout = pool_format(target, SingleDeviceSharding(jax.local_devices()[0]), one.array)
        page_bytes = page_bytes_on_device(one, dtype, layout)
        steady, available = device_memory()
        wanted = config.device_cache_bytes(available)
        if wanted is None:
            most = limits.max_num_seqs * -(-self.context_length // page_size) * page_bytes
            pages = pool_pages(min(int(steady * platform.pool_share), most), available, page_bytes) - 1
        else:
            pages = wanted // page_bytes - 1
            if wanted > available:
                raise ConfigError(
                    f"device_cache_size: {wanted} bytes are asked for, but only {available} are available"
                )
        if pages < 1:
            raise ConfigError(
                f"device_cache_size: there is room for no page; a page of {page_size} tokens takes {page_bytes} bytes,"
                " and one more is kept as scratch"
            )
        return DevicePool(one._replace(pages=pages), dtype, layout=layout)


def _bytes_per_step(params: Params, model: ModelConfig) -> int:
    read = {name: leaf for name, leaf in params.items() if name != "embed" or model.tie_embeddings}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that belongs to a model. Raises `TokenizerError`."""
    return Tokenizer.from_gguf(source.raw) if source.kind == "gguf" else Tokenizer.from_hf_dir(source.path)


def _chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    tool_use = tokenizer.chat_templates.get("tool_use")
    source = tokenizer.chat_template or tool_use
    if source is None:
        return None
    return ChatTemplate(source, tokenizer.bos_token or "", tokenizer.eos_token or "", tool_use=tool_use)


def _context_length(config: EngineConfig, source: ModelSource) -> int:
    most = source.config.max_position_embeddings
    if config.context_length is not None and config.context_length > most:
        raise ConfigError(f"context_length: {config.context_length} exceeds the model's own {most}")
    return config.context_length or most
