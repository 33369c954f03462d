"""Ragged paged attention in plain jnp: slow, readable, and the truth that every other path is held against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .batch import RaggedBatch
from .pages import PoolShape, gather_layer


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
    """See `kernels.Attend`. Python loops over rows: for concrete (not traced) batches only."""
    tokens, heads, head_dim = q_thd.shape
    kv_heads = PoolShape.of(pool).kv_heads
    factor = float(head_dim) ** -0.5 if scale is None else scale
    out = jnp.zeros((tokens, heads, head_dim), jnp.float32)
    for row in range(int(batch.num_rows)):
        start, end, kv_len = int(batch.q_starts[row]), int(batch.q_starts[row + 1]), int(batch.kv_lens[row])
        kv = gather_layer(pool, batch.page_table[row], layer)[:kv_len].astype(jnp.float32)
        k_nkd, v_nkd = kv[..., :head_dim], kv[..., head_dim:]
        q = q_thd[start:end].astype(jnp.float32).reshape(end - start, kv_heads, -1, head_dim)
        scores = jnp.einsum("qkgd,nkd->kgqn", q, k_nkd) * factor
        if soft_cap:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        q_pos = jnp.arange(kv_len - (end - start), kv_len)[:, None]
        kv_pos = jnp.arange(kv_len)[None]
        visible = kv_pos <= q_pos
        if int(window):
            visible &= kv_pos > q_pos - int(window)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("kgqn,nkd->qkgd", weights, v_nkd)
        out = out.at[start:end].set(mixed.reshape(end - start, heads, head_dim))
    return out.astype(q_thd.dtype)
