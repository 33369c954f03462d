"""Ragged paged attention on Hopper: prefill chunks by one kernel, single tokens by another."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..batch import RaggedBatch
from ..pages import PoolShape
from .blocks import DECODE, PREFILL
from .hopper_decode import attend_decodes
from .hopper_flash import Plan
from .hopper_prefill import attend_chunks


def attend(
    q_thd: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    window: jax.Array | int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `kernels.Attend`. interpret: an `InterpretGPUParams`, to run without a GPU."""
    tokens, _, head_dim = q_thd.shape
    shape = PoolShape.of(pool)
    pool_nkd = pool.reshape(-1, shape.kv_heads, shape.row_width)
    scale = float(head_dim) ** -0.5 if scale is None else scale
    plan = partial(
        Plan,
        head_dim=head_dim,
        page_size=shape.page_size,
        layers=shape.layers,
        scale=scale,
        soft_cap=soft_cap,
        interpreted=interpret is not None,
    )
    layer_i, window_i = jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32)
    by_row = attend_decodes(q_thd, pool_nkd, layer_i, batch, window_i, plan(DECODE[head_dim]), interpret)
    # Decodes follow the chunks, one token each.
    first_decode = batch.q_starts[batch.num_chunks]
    token = jnp.arange(tokens)
    row = batch.num_chunks + token - first_decode
    is_decode = (token >= first_decode) & (row < batch.num_rows)
    decoded = by_row.at[jnp.clip(row, 0, by_row.shape[0] - 1)].get(mode="promise_in_bounds")
    out = jnp.where(is_decode[:, None, None], decoded.astype(q_thd.dtype), 0)
    if tokens == 1:
        return out
    chunks = attend_chunks(q_thd, pool_nkd, layer_i, batch, window_i, plan(PREFILL[head_dim]), interpret)
    return jnp.where((token < first_decode)[:, None, None], chunks, out)
