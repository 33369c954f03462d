"""Ragged paged attention by the native library: pages are read where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..batch import RaggedBatch
from ..pages import PoolShape
from ..quant import quantize_kv


def attend(
    q_thd: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    window: jax.Array | int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
) -> jax.Array:
    """See `kernels.Attend`. The library must be loaded.

    A token's result depends, to the bit, on its query and on the KV that it sees alone: not on what shares its batch, on
    how its prompt was cut into chunks, or on the number of threads. A page number or length that does not fit the pool
    fails the call.
    """
    head_dim = q_thd.shape[-1]
    call = jax.ffi.ffi_call("tierax_attend", jax.ShapeDtypeStruct(q_thd.shape, jnp.float32))
    out = call(
        q_thd.astype(jnp.float32),
        pool,
        jnp.asarray(layer, jnp.int32),
        batch.q_starts,
        batch.kv_lens,
        batch.page_table,
        batch.num_rows,
        jnp.asarray(window, jnp.int32),
        soft_cap=np.float32(soft_cap),
        scale=np.float32(float(head_dim) ** -0.5 if scale is None else scale),
    )
    return out.astype(q_thd.dtype)


def write_kv(
    pool: jax.Array, k_tkd: jax.Array, v_tkd: jax.Array, slots_t: jax.Array, layer: jax.Array | int
) -> jax.Array:
    """See `pages.write_kv`. In place whatever the pool's dtype, where XLA's CPU backend would convert a pool of bf16 to
    f32 and back, as a whole and in every layer. A slot outside the pool fails the call."""
    if PoolShape.of(pool).quantized:
        rows = quantize_kv(k_tkd, v_tkd)
    else:
        rows = jnp.concatenate([k_tkd, v_tkd], axis=-1).astype(pool.dtype)
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call = jax.ffi.ffi_call("tierax_write_kv", result, input_output_aliases={0: 0})
    return call(pool, rows, slots_t, jnp.asarray(layer, jnp.int32))
