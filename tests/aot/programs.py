"""Programs compiled for devices that need not be here: a model's whole step, and its kernels alone.

Arrays are abstract: there are no weights, and pools may be as large as the device's memory allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aot.models import LARGE_MODELS, MODELS
from tierax.engine.platform import PLATFORMS, compiler_options
from tierax.engine.step import StepFunctions, StepShapes
from tierax.models.config import ModelConfig
from tierax.models.quantized import quantize
from tierax.models.sharding import ShardedDecoder, Shares
from tierax.models.transformer import Decoder, attention_shape
from tierax.models.weights.names import is_matrix
from tierax.pallas_kernels import attention
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.kernels import AttentionShape, Target
from tierax.pallas_kernels.page_copies import gather_rows, scatter_loop, scatter_rows
from tierax.pallas_kernels.pages import PoolShape, page_bytes_on_device, pool_format

SERVING = PLATFORMS["default"]
PHASES = {"decode": 64, "mixed": SERVING.max_num_batched_tokens}
"""Token buckets: one that 64 decodes fill, and the largest, which chunks and decodes share."""
DTYPES = {"bf16": jnp.dtype(jnp.bfloat16), "f32": jnp.dtype(jnp.float32), "fp8": jnp.dtype(jnp.uint8)}


class Chip(NamedTuple):
    """A device that programs are compiled for."""

    name: str
    target: Target
    memory: int
    """Bytes that a program may use."""
    devices: Sequence[Any]


class Step(NamedTuple):
    """A whole step: forward and logits, in bf16."""

    model: str
    phase: str
    tp: int = 1
    kv: str = "bf16"
    page_size: int = SERVING.page_size
    backend: str = "auto"
    pool_share: float = SERVING.pool_share
    """Of the memory that weights leave."""
    weights: str = "bf16"
    """Or a form of quantised ones, as the loader calls it."""


class Compiled(NamedTuple):
    """What the compiler made of a program; bytes are of one device."""

    backend: str
    pages: int
    """Of the pool."""
    weight_bytes: int
    pool_bytes: int
    """Of the pool's values, without padding."""
    argument_bytes: int
    alias_bytes: int
    """Of results that take the place of arguments."""
    temp_bytes: int
    peak_bytes: int
    """Arguments, results with a place of their own, and temporaries."""
    seconds: float
    """For lowering and compiling."""

    def faults(self, memory: int, most_temp: int) -> list[str]:
        """What is wrong with it: a pool that is copied, or more than the device has."""
        found = []
        if self.alias_bytes < self.pool_bytes:
            found.append(
                f"the pool is not updated in place: {self.alias_bytes} of {self.pool_bytes} bytes aliased"
            )
        if self.temp_bytes > most_temp:
            found.append(f"temporaries of {self.temp_bytes} bytes beside a pool of {self.pool_bytes}")
        if self.peak_bytes > memory:
            found.append(f"needs {self.peak_bytes} bytes, and the device has {memory}")
        return found


def compile_step(chip: Chip, step: Step) -> Compiled:
    """Compiles one step as the engine packs it, with its token bucket and its page table, for `step.tp` devices.

    The table has room for a context of 8,192 tokens. Raises what the compiler raises.
    """
    config, dtype = (MODELS | LARGE_MODELS)[step.model], DTYPES["bf16"]
    mesh = Mesh(np.array(chip.devices[: step.tp]), ("tp",))
    shares = Shares(config, mesh)
    shape = attention_shape(shares.share, step.page_size, "bf16", step.kv)
    kernels = attention.select(chip.target, shape, step.backend)
    decoder = ShardedDecoder(shares, dtype, kernels) if step.tp > 1 else Decoder(config, dtype, kernels)
    params = _abstract_params(config, dtype)
    if step.weights != "bf16":
        params = _quantized(params, step.weights)
    params = _placed(shares, jax.eval_shape(shares.rearranged, params))
    weight_bytes = sum(map(_device_bytes, jax.tree.leaves(params)))
    pool = _step_pool(chip, shares, step, int((chip.memory - weight_bytes) * step.pool_share))

    seqs, width = SERVING.max_num_seqs, -(-8192 // step.page_size)
    shapes = StepShapes(seqs, SERVING.max_num_batched_tokens, width, step.page_size, pool.shape[0] - 1)
    tokens = PHASES[step.phase]
    layout, options = pool_format(chip.target, pool.sharding, pool.shape), compiler_options(chip.target)
    functions = StepFunctions(decoder, shapes, layout, options)
    everywhere = NamedSharding(mesh, PartitionSpec())
    integers = [np.zeros(seqs, np.int32), *shapes.pack_empty(tokens)]
    packed = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=everywhere) for array in integers]
    hidden = jax.ShapeDtypeStruct((shapes.rows(tokens), config.hidden_size), dtype, sharding=everywhere)

    def compile_both() -> list[Any]:
        forward = functions.forward.lower(params, pool, *packed, tokens=tokens)
        logits = jax.jit(decoder.logits, compiler_options=options).lower(params, hidden)
        return [forward.compile(), logits.compile()]

    compiled = _compiled(kernels.name, mesh, pool, compile_both)
    return compiled._replace(weight_bytes=weight_bytes)


def default_backend(chip: Chip, step: Step) -> str:
    """The kernels that `auto` takes for a step."""
    mesh = Mesh(np.array(chip.devices[: step.tp]), ("tp",))
    share = Shares(MODELS[step.model], mesh).share
    return attention.select(chip.target, attention_shape(share, step.page_size, "bf16", step.kv)).name


def compile_kernels(chip: Chip, shape: AttentionShape, backend: str) -> Compiled:
    """Compiles one layer's KV write and attention alone, for a mixed batch of 300 tokens and 32 rows."""
    kernels = attention.select(chip.target, shape, backend)
    mesh = Mesh(np.array(chip.devices[:1]), ("tp",))
    tokens, rows, layers, dtype = 300, 32, 4, DTYPES[shape.dtype]
    pool = _kernel_pool(chip, mesh, shape, layers)

    def write_and_attend(pool, layer, window, slots, q, k, v, batch):
        pool = kernels.write_kv(pool, k, v, slots, layer)
        return pool, kernels.attend(q, pool, layer, batch, window=window)

    everywhere = NamedSharding(mesh, PartitionSpec())

    def abstract(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    q = abstract(tokens, shape.heads, shape.head_dim, dtype=dtype)
    k = v = abstract(tokens, shape.kv_heads, shape.head_dim, dtype=dtype)
    table = abstract(rows, 8192 // shape.page_size)
    batch = RaggedBatch(abstract(rows + 1), abstract(rows), table, num_chunks=abstract(), num_rows=abstract())
    integers = (abstract(), abstract(), abstract(tokens))
    layout, options = pool_format(chip.target, pool.sharding, pool.shape), compiler_options(chip.target)
    jitted = jax.jit(
        write_and_attend, donate_argnums=0, out_shardings=(layout, None), compiler_options=options
    )
    arguments = (pool, *integers, q, k, v, batch)
    return _compiled(kernels.name, mesh, pool, lambda: [jitted.lower(*arguments).compile()])


def compile_page_copies(chip: Chip, shape: AttentionShape) -> tuple[Compiled, Compiled]:
    """Compiles the gather of 32 pages of four layers and the scatter, in the forms that `DevicePool` takes there."""
    mesh = Mesh(np.array(chip.devices[:1]), ("tp",))
    pool = _kernel_pool(chip, mesh, shape, layers=4)
    layout = pool_format(chip.target, pool.sharding, pool.shape)
    everywhere = NamedSharding(mesh, PartitionSpec())
    pages = jax.ShapeDtypeStruct((32,), jnp.int32, sharding=everywhere)
    block = jax.ShapeDtypeStruct((32, *pool.shape[1:]), pool.dtype, sharding=everywhere)
    gather = jax.jit(partial(gather_rows, wire=pool.dtype)).lower(pool, pages)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    form, arguments = (scatter_rows, ()) if layout is None else (scatter_loop, (count,))
    jitted = jax.jit(form, donate_argnums=0, out_shardings=(layout, None))
    scatter = jitted.lower(pool, block, pages, *arguments)
    return (
        _compiled("xla", mesh, pool, lambda: [gather.compile()]),
        _compiled("xla", mesh, pool, lambda: [scatter.compile()]),
    )


def _compiled(backend: str, mesh: Mesh, pool: Any, compile_all: Callable[[], list[Any]]) -> Compiled:
    """Of programs that run one after the other; the pool is the first one's."""
    start = time.perf_counter()
    # The context tells Pallas which device it compiles for.
    with jax.set_mesh(mesh):
        memories = [program.memory_analysis() for program in compile_all()]
    seconds = round(time.perf_counter() - start, 1)
    memory = memories[0]
    return Compiled(
        backend,
        pool.shape[0] - 1,
        0,
        _device_bytes(pool),
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        max(each.temp_size_in_bytes for each in memories),
        memory.argument_size_in_bytes
        + max(
            each.output_size_in_bytes - each.alias_size_in_bytes + each.temp_size_in_bytes
            for each in memories
        ),
        seconds,
    )


def _abstract_params(config: ModelConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """Parameters with stacked layers."""
    top = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in config.top_shapes().items()}
    layers = {
        name: jax.ShapeDtypeStruct((len(config.layers_with(name)), *shape), dtype)
        for name, shape in config.layer_shapes().items()
    }
    return top | {"layers": layers}


def _quantized(params: dict[str, Any], kind: str) -> dict[str, Any]:
    """The same with quantised matrices."""
    few_bits = partial(jax.eval_shape, partial(quantize, kind=kind))

    def each(leaves: dict[str, Any], stacked: int) -> dict[str, Any]:
        return {
            name: few_bits(leaf) if is_matrix(name, leaf.ndim - stacked) else leaf
            for name, leaf in leaves.items()
        }

    layers = each(params["layers"], 1)
    return each({name: leaf for name, leaf in params.items() if name != "layers"}, 0) | {"layers": layers}


def _placed(shares: Shares, params: Any) -> Any:
    def place(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(shares.mesh, spec))

    return jax.tree.map(place, params, shares.specs(params))


def _step_pool(chip: Chip, shares: Shares, step: Step, size: int) -> jax.ShapeDtypeStruct:
    """As many pages as `size` bytes of a device hold, padding included."""
    share, quantized, dtype = shares.share, step.kv == "fp8", DTYPES[step.kv]
    one = PoolShape(1, share.num_layers, step.page_size, share.num_kv_heads, share.head_dim, quantized)
    alone = NamedSharding(Mesh(np.array(chip.devices[:1]), ("tp",)), PartitionSpec())
    layout = pool_format(chip.target, alone, one.array)
    pages = size // page_bytes_on_device(one, dtype, layout) - 1
    array = shares.pool_array(pages, step.page_size, quantized=quantized)
    return _abstract_pool(chip, array, dtype, NamedSharding(shares.mesh, shares.pool_spec))


def _kernel_pool(chip: Chip, mesh: Mesh, shape: AttentionShape, layers: int) -> jax.ShapeDtypeStruct:
    """A pool of 65,536 tokens."""
    quantized = shape.kv_dtype == "fp8"
    pages = 65_536 // shape.page_size
    array = PoolShape(pages, layers, shape.page_size, shape.kv_heads, shape.head_dim, quantized).array
    return _abstract_pool(chip, array, DTYPES[shape.kv_dtype], NamedSharding(mesh, PartitionSpec()))


def _abstract_pool(
    chip: Chip, array: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array, dtype, sharding=pool_format(chip.target, sharding, array) or sharding)


def _device_bytes(leaf: Any) -> int:
    # Two int4 numbers share a byte.
    bits = 4 if leaf.dtype == jnp.int4 else 8 * leaf.dtype.itemsize
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * bits // 8
