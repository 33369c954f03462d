"""Writes the KV of a step's tokens into the pool, in place, by DMA.

XLA's scatter would do, but is free to choose a layout of its own for the pool, and copies one token at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..pages import PoolShape
from ..quant import quantize_kv

RUN = 16
"""Tokens per DMA where slots follow each other in a page, as a chunk's do: the smallest page a pool can have here."""


def write_kv(
    pool: jax.Array,
    k_tkd: jax.Array,
    v_tkd: jax.Array,
    slots_t: jax.Array,
    layer: jax.Array | int,
    *,
    interpret: Any = False,
) -> jax.Array:
    """See `pages.write_kv`."""
    shape = PoolShape.of(pool)
    if shape.quantized:
        kv_tkw = quantize_kv(k_tkd, v_tkd)
    else:
        kv_tkw = jnp.concatenate([k_tkd, v_tkd], axis=-1).astype(pool.dtype)
    if shape.kv_heads == 1:
        # Tokens lie side by side in a tile of memory then, of which a DMA cannot write one alone.
        page, offset = slots_t // shape.page_size, slots_t % shape.page_size
        return pool.at[page, layer, offset].set(kv_tkw[:, 0], mode="promise_in_bounds", unique_indices=True)
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, shape.page_size),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(),
            in_specs=[any_memory] * 2,
            out_specs=any_memory,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        input_output_aliases={4: 0},
        interpret=interpret,
        name="write_kv",
    )(jnp.reshape(jnp.asarray(layer, jnp.int32), 1), slots_t, _runs(slots_t, shape.page_size), kv_tkw, pool)


def _runs(slots_t: jax.Array, page_size: int) -> jax.Array:
    """i32 `[T // RUN]`: 1 where a run of tokens has consecutive slots of one page."""
    slots = slots_t[: slots_t.shape[0] // RUN * RUN].reshape(-1, RUN)
    consecutive = (slots == slots[:, :1] + jnp.arange(RUN)).all(1)
    return (consecutive & (slots[:, 0] // page_size == slots[:, -1] // page_size)).astype(jnp.int32)


def _kernel(page_size: int, layer, slots, runs, kv, _, pool, sem) -> None:
    def copy(token: jax.Array, size: int):
        slot = slots[token]
        place = pool.at[lax.div(slot, page_size), layer[0], pl.ds(lax.rem(slot, page_size), size)]
        return pltpu.make_async_copy(kv.at[pl.ds(token, size)], place, sem)

    def start_run(run: jax.Array, _) -> None:
        token = run * RUN
        together = runs[run] != 0
        pl.when(together)(lambda: copy(token, RUN).start())
        pl.when(~together)(lambda: lax.fori_loop(0, RUN, lambda i, _: copy(token + i, 1).start(), None))

    def start_token(token: jax.Array, _) -> None:
        copy(token, 1).start()

    tokens = kv.shape[0]
    if tokens >= RUN:
        lax.fori_loop(0, tokens // RUN, start_run, None)
    lax.fori_loop(tokens // RUN * RUN, tokens, start_token, None)
    # All copies count on one semaphore, by bytes.
    pltpu.make_async_copy(kv, kv, sem).wait()
