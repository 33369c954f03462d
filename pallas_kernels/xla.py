"""Ragged paged attention in pure XLA: CPU, and shapes or platforms that no kernel covers.

Pages are gathered block by block, laid out `[kv_heads, tokens, ...]`, and folded in by an online softmax, so that cost
follows true lengths and memory is one block whatever the context. Decodes go in groups of rows, prefill chunks in tiles
of query tokens; padding takes no iterations. Sizes are from measurements on two Zen 3 cores (docs/log.md).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .batch import RaggedBatch
from .experts import looped_linear
from .kernels import AttentionShape, Kernels, Target
from .linear import linear
from .pages import PoolShape, gather_layer, write_kv

DECODE_GROUP = 4
"""Decode rows per iteration: fewer pay more loop overhead, more waste work on rows of unequal length."""
DECODE_BLOCK = 128
"""KV tokens per iteration of a full group of decodes; where there are fewer rows in all, as many more."""
CHUNK_TILE = 256
"""Query tokens per prefill tile."""
CHUNK_BLOCK = 512
"""KV tokens per iteration of a prefill tile."""
NEG_INF = -1e30
"""Finite, so that a fully masked block leaves no NaN behind."""


def refuses(target: Target, shape: AttentionShape) -> str | None:
    """Nothing: this path serves wherever XLA does."""
    return None


def kernels(target: Target, shape: AttentionShape) -> Kernels:
    grouped = looped_linear if target.platform == "cpu" else partial(looped_linear, most_rows=128)
    return Kernels("xla", attend, write_kv, linear, grouped)


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
    """See `kernels.Attend`."""
    tokens, _, head_dim = q_thd.shape
    scale = float(head_dim) ** -0.5 if scale is None else scale
    q_thd = q_thd * jnp.asarray(scale, q_thd.dtype)
    out = jnp.zeros_like(q_thd)
    if tokens > 1:
        out = _attend_chunks(q_thd, out, pool, layer, batch, window, soft_cap)
    return _attend_decodes(q_thd, out, pool, layer, batch, window, soft_cap)


class _Softmax(NamedTuple):
    """An online softmax in progress over rows `[..., R]` (Milakov and Gimelshein, 2018)."""

    top: jax.Array
    """f32 `[..., R]`: largest score so far."""
    total: jax.Array
    """f32 `[..., R]`: sum of the weights."""
    mixed: jax.Array
    """f32 `[..., R, head_dim]`: weighted sum of values."""

    @classmethod
    def empty(cls, rows: tuple[int, ...], head_dim: int) -> _Softmax:
        return cls(
            jnp.full(rows, NEG_INF, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((*rows, head_dim), jnp.float32),
        )

    def fold(self, q_rd: jax.Array, kv_nw: jax.Array, visible: jax.Array, soft_cap: float) -> _Softmax:
        """Takes in one block. q_rd `[..., R, D]`, kv_nw `[..., N, 2 * D]`, visible broadcasts to `[..., R, N]`."""
        head_dim = q_rd.shape[-1]
        scores = jnp.einsum("...rd,...nd->...rn", q_rd, kv_nw[..., :head_dim])
        if soft_cap:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, NEG_INF)
        top = jnp.maximum(self.top, scores.max(-1))
        weights = jnp.exp(scores - top[..., None])
        keep = jnp.exp(self.top - top)
        mixed = jnp.einsum("...rn,...nd->...rd", weights, kv_nw[..., head_dim:])
        return _Softmax(top, self.total * keep + weights.sum(-1), self.mixed * keep[..., None] + mixed)

    def result(self) -> jax.Array:
        """Rows of padding give something finite that nobody reads."""
        return self.mixed / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def _gather(pool: jax.Array, pages: jax.Array, layer: jax.Array | int) -> jax.Array:
    """KV of pages `[..., P]`, f32 `[..., kv_heads, P * page_size, 2 * head_dim]`."""
    kv = gather_layer(pool, pages.reshape(-1), layer)
    kv = kv.reshape(*pages.shape[:-1], -1, *kv.shape[1:])
    return jnp.swapaxes(kv, -2, -3).astype(jnp.float32)


def _attend_decodes(q_thd, out, pool, layer, batch, window, soft_cap):
    """Rows of one token, a group at a time; the last group may read rows of padding, whose length counts as 0."""
    tokens, heads, head_dim = q_thd.shape
    _, _, page_size, kv_heads, *_ = PoolShape.of(pool)
    size = min(DECODE_GROUP, batch.kv_lens.shape[0])
    pages_per_block = _pages_per_block(DECODE_GROUP // size * DECODE_BLOCK, batch.page_table, page_size)
    block = pages_per_block * page_size
    table = _pad(batch.page_table, size, pages_per_block)
    row_index = jnp.arange(batch.kv_lens.shape[0])
    kv_lens = _pad(jnp.where(row_index < batch.num_rows, batch.kv_lens, 0), size)
    q_thd, padded_out = _pad(q_thd, size), _pad(out, size)

    def group(g, out):
        first_row = batch.num_chunks + g * size
        token = batch.q_starts[first_row]
        kv_len = lax.dynamic_slice(kv_lens, (first_row,), (size,))
        q = lax.dynamic_slice(q_thd, (token, 0, 0), (size, heads, head_dim)).astype(jnp.float32)
        q = q.reshape(size, kv_heads, heads // kv_heads, head_dim)
        first_pos = jnp.where(window > 0, jnp.maximum(kv_len - window, 0), 0)

        def kv_block(b, softmax):
            pages = lax.dynamic_slice(table, (first_row, b * pages_per_block), (size, pages_per_block))
            pos = b * block + jnp.arange(block)[None]
            visible = (pos >= first_pos[:, None]) & (pos < kv_len[:, None])
            return softmax.fold(q, _gather(pool, pages, layer), visible[:, None, None], soft_cap)

        softmax = lax.fori_loop(
            first_pos.min() // block,
            -(-kv_len.max() // block),
            kv_block,
            _Softmax.empty(q.shape[:-1], head_dim),
        )
        mixed = softmax.result().reshape(size, heads, head_dim).astype(out.dtype)
        return lax.dynamic_update_slice(out, mixed, (token, 0, 0))

    groups = -(-(batch.num_rows - batch.num_chunks) // size)
    return lax.fori_loop(0, groups, group, padded_out)[:tokens]


def _attend_chunks(q_thd, out, pool, layer, batch, window, soft_cap):
    """Rows of several tokens, in tiles. A tile writes a full tile of outputs; what it writes past its row is
    overwritten by the rows after it, which is why chunks run in order and before decodes."""
    tokens, heads, head_dim = q_thd.shape
    _, _, page_size, kv_heads, *_ = PoolShape.of(pool)
    group = heads // kv_heads
    tile = min(CHUNK_TILE, tokens)
    pages_per_block = _pages_per_block(CHUNK_BLOCK, batch.page_table, page_size)
    block = pages_per_block * page_size
    table = _pad(batch.page_table, 1, pages_per_block)
    q_thd, padded_out = _pad(q_thd, tile), _pad(out, tile)

    def row(r, out):
        start, end = batch.q_starts[r], batch.q_starts[r + 1]
        offset = batch.kv_lens[r] - (end - start)

        def q_tile(i, out):
            first = start + i * tile
            q = lax.dynamic_slice(q_thd, (first, 0, 0), (tile, heads, head_dim)).astype(jnp.float32)
            q = q.reshape(tile, kv_heads, group, head_dim).transpose(1, 0, 2, 3)
            q_krd = q.reshape(kv_heads, tile * group, head_dim)
            q_pos = jnp.repeat(offset + i * tile + jnp.arange(tile), group)[:, None]
            last_pos = jnp.minimum(offset + (i + 1) * tile, batch.kv_lens[r])
            first_pos = jnp.where(window > 0, jnp.maximum(offset + i * tile + 1 - window, 0), 0)

            def kv_block(b, softmaxes):
                pages = lax.dynamic_slice(table, (r, b * pages_per_block), (1, pages_per_block))[0]
                kv_knw = _gather(pool, pages, layer)
                pos = (b * block + jnp.arange(block))[None]
                visible = (pos <= q_pos) & ((window <= 0) | (pos > q_pos - window))
                # Head by head: at this size plain matrix products are a third faster than one batched product.
                return tuple(
                    softmax.fold(q_krd[k], kv_knw[k], visible, soft_cap)
                    for k, softmax in enumerate(softmaxes)
                )

            empty = (_Softmax.empty((tile * group,), head_dim),) * kv_heads
            softmaxes = lax.fori_loop(first_pos // block, -(-last_pos // block), kv_block, empty)
            mixed = jnp.stack([softmax.result() for softmax in softmaxes])
            mixed = mixed.reshape(kv_heads, tile, group, head_dim).transpose(1, 0, 2, 3)
            mixed = mixed.reshape(tile, heads, head_dim).astype(out.dtype)
            return lax.dynamic_update_slice(out, mixed, (first, 0, 0))

        return lax.fori_loop(0, -(-(end - start) // tile), q_tile, out)

    return lax.fori_loop(0, batch.num_chunks, row, padded_out)[:tokens]


def _pages_per_block(tokens: int, table: jax.Array, page_size: int) -> int:
    return max(1, min(tokens // page_size, table.shape[1]))


def _pad(array: jax.Array, rows: int, width: int = 1) -> jax.Array:
    """Zeros behind: `rows` more of the first axis, and the second (of a table) filled up to a multiple of `width`."""
    pads = [(0, rows), *[(0, 0)] * (array.ndim - 1)]
    if width > 1:
        pads[1] = (0, -array.shape[1] % width)
    return jnp.pad(array, pads)
