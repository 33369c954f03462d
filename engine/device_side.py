"""What of an engine lies on devices: parameters, page pool and programs. Every process that takes part has this."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..cache.device_pool import DevicePool
from ..cache.split_device_pool import Split, SplitDevicePool
from ..models.config import ModelConfig
from ..models.sharding import ShardedDecoder
from ..models.source import ModelSource
from ..models.transformer import Decoder, Params, attention_shape
from ..models.weights.loader import load_params
from ..pallas_kernels import attention
from ..pallas_kernels.kernels import Kernels
from ..pallas_kernels.pages import PoolShape, page_bytes_on_device, pool_format
from .config import ConfigError, EngineConfig
from .huge_pages import use_huge_pages
from .placement import Placement
from .plan import Limits
from .platform import PLATFORMS, compiler_options, device_memory, device_target, pool_pages, weight_form
from .programs import ProgramStore
from .step import StepFunctions, StepShapes
from .step_device import StepDevice
from .version import __version__

logger = logging.getLogger(__name__)

_JAX_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_POOL_DTYPES = _JAX_DTYPES | {"fp8": jnp.uint8}


class DeviceSide:
    """A model loaded onto its devices, with a page pool beside it. Compiles nothing yet."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        placement: Placement,
        *,
        twin: DeviceSide | None = None,
        progress: bool = False,
        on_load: Callable[[], None] = lambda: None,
        agree: Callable[[int, dict[str, Any]], int] = lambda pages, settings: pages,
        announce: Callable[..., None] = lambda command, *arguments: None,
    ) -> None:
        """twin: the same model on as many other devices; parameters are copied from there, and the pools are of one size.
        on_load: called for each compiled program that was found; agree: makes of the number of pages that fit here the
        one that fits in every process, all of which must have the same settings; announce: see `StepDevice`.

        Raises `ConfigError` or `ModelError` for what cannot be used.
        """
        self.platform = platform = PLATFORMS.get(jax.default_backend(), PLATFORMS["default"])
        self.placement = placement
        self.context_length = _context_length(config, source)
        self.dtype = dtype = platform.dtype if config.dtype == "auto" else config.dtype
        self.activations = platform.activations or dtype
        self.kv_dtype = self.activations if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self.weight_form = weight_form(config.quantization, jax.default_backend())
        self.limits = Limits(
            config.max_num_seqs or platform.max_num_seqs,
            config.max_num_batched_tokens or platform.max_num_batched_tokens,
            config.shared_step_tokens or platform.shared_step_tokens,
        )
        self._config = config
        self._model = source.config
        self._target = device_target()
        self._page_size = config.page_size or platform.page_size
        kernels = self._select_kernels()
        if twin is not None:
            params = placement.copied(twin.steps.params)
        else:
            params = load_params(
                source,
                source.config,
                dtype=dtype,
                quantization=self.weight_form,
                stacked=platform.stacked,
                progress=progress,
                shares=placement.shares,
            )
        use_huge_pages(jax.tree.leaves(params))
        self.weight_bytes = _bytes_per_step(params, source.config)
        """Of parameters, read by every step; an embedding table that is no output head is not."""
        self._param_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        self.pool = pool = self._make_pool(agree, twin)
        self.shapes = StepShapes(
            self.limits.max_num_seqs,
            self.limits.max_num_batched_tokens,
            table_width=-(-self.context_length // self._page_size),
            page_size=self._page_size,
            num_pages=pool.shape.pages,
        )
        functions = StepFunctions(
            self._decoder(kernels),
            self.shapes,
            pool.placement,
            compiler_options(self._target),
            placement.everywhere,
            self._program_store(kernels, on_load),
        )
        self.steps = StepDevice(
            params,
            pool,
            functions,
            num_slots=self.limits.max_num_seqs,
            vocab_size=source.config.vocab_size,
            everywhere=placement.everywhere,
            device=placement.device,
            announce=announce,
        )

    def _select_kernels(self) -> Kernels:
        share = self.placement.share_of(self._model)
        shape = attention_shape(share, self._page_size, self.activations, self.kv_dtype)
        try:
            kernels = attention.select(self._target, shape, self._config.attention_backend)
        except ValueError as error:
            raise ConfigError(f"attention_backend: {error}") from None
        logger.info("kernels on %s: %s", self._target.platform, kernels.summary)
        return kernels

    def _program_store(self, kernels: Kernels, on_load: Callable[[], None]) -> ProgramStore:
        directory, placement = self._config.compile_cache_path(), self.placement
        if jax.process_count() > 1:
            directory = None  # jax's own cache knows how to keep the programs of several processes
        split = None if placement.shares is None else (placement.shares.rules, placement.shares.mesh.shape)
        made_from = (
            self._model,
            self.activations,
            kernels.summary,
            self._target,
            vars(self.shapes),
            (self.pool.shape, self.pool.dtype),
            split,
        )
        return ProgramStore(
            None if directory is None else directory / "programs", made_from, placement.local, on_load
        )

    def _decoder(self, kernels: Kernels) -> Decoder | ShardedDecoder:
        shares, dtype = self.placement.shares, jnp.dtype(_JAX_DTYPES[self.activations])
        if shares is None:
            return Decoder(self._model, dtype, kernels)
        return ShardedDecoder(shares, dtype, kernels)

    def _make_pool(self, agree: Callable[[int, dict[str, Any]], int], twin: DeviceSide | None) -> DevicePool:
        model, shares, dtype = self._model, self.placement.shares, jnp.dtype(_POOL_DTYPES[self.kv_dtype])
        share = self.placement.share_of(model)
        one = PoolShape(1, model.num_layers, self._page_size, share.num_kv_heads, model.head_dim)
        one = one._replace(quantized=dtype == jnp.uint8)
        layout = pool_format(self._target, self.placement.single, one.array)
        if twin is not None:
            # What is left of a memory that both share says nothing any more.
            pages = twin.pool.shape.pages
        else:
            pages = agree(self._num_pages(page_bytes_on_device(one, dtype, layout)), self._settings())
        if shares is None:
            return DevicePool(one._replace(pages=pages), dtype, layout=layout, device=self.placement.device)
        order = self.placement.head_order
        array = shares.pool_array(pages, self._page_size, quantized=one.quantized)
        split = Split(shares.pool_sharding, array, order)
        layout = pool_format(self._target, shares.pool_sharding, array)
        whole = one._replace(pages=pages, kv_heads=len(order.heads))
        return SplitDevicePool(whole, dtype, split, layout=layout)

    def _settings(self) -> dict[str, Any]:
        """All that programs and their order depend on, as it is told to other processes."""
        return {
            "model": repr(self._model),
            "tp_size": self._config.tp_size,
            "dtype": self.dtype,
            "activations": self.activations,
            "kv_cache_dtype": self.kv_dtype,
            "quantization": self._config.quantization,
            "page_size": self._page_size,
            "context_length": self.context_length,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "platform": f"{self._target.platform} {self._target.generation}".strip(),
            "version": f"tierax {__version__}, jax {jax.__version__}",
        }

    def _num_pages(self, page_bytes: int) -> int:
        """Pages that fit on each device, of which one takes `page_bytes` there."""
        config, page_size = self._config, self._page_size
        copies = config.dp_size
        steady, available = device_memory(
            self.placement.local, copies=copies, to_come=(copies - 1) * self._param_bytes
        )
        wanted = config.device_cache_bytes(available)
        if wanted is None:
            most = self.limits.max_num_seqs * -(-self.context_length // page_size) * page_bytes
            share = int(steady * self.platform.pool_share)
            pages = pool_pages(min(share, most), available, page_bytes) - 1
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
        return pages


def _bytes_per_step(params: Params, model: ModelConfig) -> int:
    read = {name: leaf for name, leaf in params.items() if name != "embed" or model.tie_embeddings}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def _context_length(config: EngineConfig, source: ModelSource) -> int:
    most = source.config.max_position_embeddings
    if config.context_length is not None and config.context_length > most:
        raise ConfigError(f"context_length: {config.context_length} exceeds the model's own {most}")
    return config.context_length or most
