"""Ragged paged attention in pure XLA: CPU, and shapes or platforms that no kernel covers.

Each row is walked on its own with an online softmax over blocks of its pages, so cost follows true lengths: padded
rows cost nothing, and memory is one block per row whatever the context. Rows run one after the other; the matrix
products inside use the platform's threads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .batch import RaggedBatch
from .pages import gather_layer

DECODE_BLOCK = 256
"""KV tokens per iteration of a decode row: larger wastes work on short contexts, smaller pays loop overhead."""
CHUNK_BLOCK = 512
"""KV tokens per iteration of a prefill tile."""
CHUNK_TILE = 128
"""Query tokens per prefill tile."""
NEG_INF = -1e30
"""Finite, so that a fully masked block leaves no NaN behind."""


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
    """See `attention.attend`."""
    tokens, _, head_dim = q_thd.shape
    scale = head_dim**-0.5 if scale is None else scale
    q_thd = q_thd * jnp.asarray(scale, q_thd.dtype)
    out = jnp.zeros_like(q_thd)
    if tokens > 1:
        out = _attend_chunks(q_thd, out, pool, layer, batch, window, soft_cap)
    return _attend_decodes(q_thd, out, pool, layer, batch, window, soft_cap)


def _attend_decodes(q_thd, out, pool, layer, batch, window, soft_cap):
    """Rows of one token. The query is spread over the width of a KV row, zeros elsewhere, so that scores and
    mixing are one plain matrix product each over all heads; products per KV head would be too thin to pay."""
    tokens, heads, head_dim = q_thd.shape
    kv_heads, width = pool.shape[3], pool.shape[4]
    group = heads // kv_heads
    page_size = pool.shape[2]
    pages_per_block = max(1, min(DECODE_BLOCK // page_size, batch.page_table.shape[1]))
    block = pages_per_block * page_size
    table = _pad_table(batch.page_table, pages_per_block)
    own_head = jnp.arange(heads)[:, None] // group == jnp.arange(kv_heads)[None]

    def row(r, out):
        token = batch.q_starts[r]
        kv_len = batch.kv_lens[r]
        q_hd = lax.dynamic_index_in_dim(q_thd, token, 0, keepdims=False).astype(jnp.float32)
        spread = jnp.where(own_head[:, :, None], q_hd[:, None, :], 0.0)
        spread = jnp.concatenate([spread, jnp.zeros_like(spread)], -1).reshape(heads, kv_heads * width)
        first_pos = jnp.where(window > 0, jnp.maximum(kv_len - window, 0), 0)

        def kv_block(b, carry):
            top, total, mixed = carry
            ids = lax.dynamic_slice(table, (r, b * pages_per_block), (1, pages_per_block))[0]
            kv = gather_layer(pool, ids, layer).reshape(block, kv_heads * width).astype(jnp.float32)
            scores = _cap(_dot_nt(spread, kv), soft_cap)
            pos = b * block + jnp.arange(block)
            scores = jnp.where((pos >= first_pos) & (pos < kv_len), scores, NEG_INF)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[:, None])
            keep = jnp.exp(top - new_top)
            return new_top, total * keep + weights.sum(-1), mixed * keep[:, None] + weights @ kv

        init = (
            jnp.full(heads, NEG_INF, jnp.float32),
            jnp.zeros(heads, jnp.float32),
            jnp.zeros((heads, kv_heads * width), jnp.float32),
        )
        top, total, mixed = lax.fori_loop(first_pos // block, (kv_len + block - 1) // block, kv_block, init)
        v_hkd = mixed.reshape(heads, kv_heads, width)[:, :, head_dim:]
        v_hd = jnp.where(own_head[:, :, None], v_hkd, 0.0).sum(1) / total[:, None]
        return lax.dynamic_update_index_in_dim(out, v_hd.astype(out.dtype), token, 0)

    return lax.fori_loop(batch.num_chunks, batch.num_rows, row, out)


def _attend_chunks(q_thd, out, pool, layer, batch, window, soft_cap):
    """Rows of several tokens, in tiles. A tile writes a full tile of outputs; what it writes past its row is
    overwritten by the rows after it, which is why chunks run in order and before decodes."""
    tokens, heads, head_dim = q_thd.shape
    kv_heads, width = pool.shape[3], pool.shape[4]
    group = heads // kv_heads
    page_size = pool.shape[2]
    tile = min(CHUNK_TILE, tokens)
    pages_per_block = max(1, min(CHUNK_BLOCK // page_size, batch.page_table.shape[1]))
    block = pages_per_block * page_size
    table = _pad_table(batch.page_table, pages_per_block)
    pad = ((0, tile), (0, 0), (0, 0))
    q_thd, padded_out = jnp.pad(q_thd, pad), jnp.pad(out, pad)

    def row(r, out):
        start, end = batch.q_starts[r], batch.q_starts[r + 1]
        offset = batch.kv_lens[r] - (end - start)

        def q_tile(i, out):
            first = start + i * tile
            q = lax.dynamic_slice(q_thd, (first, 0, 0), (tile, heads, head_dim)).astype(jnp.float32)
            q_krd = q.reshape(tile, kv_heads, group, head_dim).transpose(1, 0, 2, 3)
            q_krd = q_krd.reshape(kv_heads, tile * group, head_dim)
            q_pos = jnp.repeat(offset + i * tile + jnp.arange(tile), group)
            last_pos = jnp.minimum(offset + (i + 1) * tile, batch.kv_lens[r])
            first_pos = jnp.where(window > 0, jnp.maximum(offset + i * tile + 1 - window, 0), 0)

            def kv_block(b, carry):
                ids = lax.dynamic_slice(table, (r, b * pages_per_block), (1, pages_per_block))[0]
                kv = gather_layer(pool, ids, layer).astype(jnp.float32)
                pos = (b * block + jnp.arange(block))[None]
                visible = pos <= q_pos[:, None]
                visible &= (window <= 0) | (pos > q_pos[:, None] - window)
                return tuple(
                    _online_softmax(q_krd[k], kv[:, k, :head_dim], kv[:, k, head_dim:], visible, part, soft_cap)
                    for k, part in enumerate(carry)
                )

            rows = tile * group
            init = (
                jnp.full(rows, NEG_INF, jnp.float32),
                jnp.zeros(rows, jnp.float32),
                jnp.zeros((rows, head_dim), jnp.float32),
            )
            parts = lax.fori_loop(
                first_pos // block, (last_pos + block - 1) // block, kv_block, (init,) * kv_heads
            )
            mixed = jnp.stack([part[2] / part[1][:, None] for part in parts], 1)
            mixed = mixed.reshape(tile, group, kv_heads, head_dim).transpose(0, 2, 1, 3)
            mixed = mixed.reshape(tile, heads, head_dim).astype(out.dtype)
            return lax.dynamic_update_slice(out, mixed, (first, 0, 0))

        return lax.fori_loop(0, (end - start + tile - 1) // tile, q_tile, out)

    return lax.fori_loop(0, batch.num_chunks, row, padded_out)[:tokens]


def _online_softmax(q_rd, k_nd, v_nd, visible_rn, carry, soft_cap):
    top, total, mixed = carry
    scores = jnp.where(visible_rn, _cap(_dot_nt(q_rd, k_nd), soft_cap), NEG_INF)
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.exp(scores - new_top[:, None])
    keep = jnp.exp(top - new_top)
    return new_top, total * keep + weights.sum(-1), mixed * keep[:, None] + weights @ v_nd


def _dot_nt(a, b):
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())))


def _cap(scores, soft_cap):
    return soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores


def _pad_table(table, multiple):
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % multiple)))
