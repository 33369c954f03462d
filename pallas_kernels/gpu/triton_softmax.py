"""What the Triton kernels share: masked rows of flat arrays, and pages folded into an online softmax."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..quant import SCALE_BYTES

LOWEST = -1e30
"""Finite, so that a row that sees nothing of a block leaves no NaN behind."""
_LOG2_E = math.log2(math.e)


class Geometry(NamedTuple):
    """What a kernel is specialised by, besides its block sizes."""

    layers: int
    page_size: int
    kv_heads: int
    group: int
    """Query heads per KV head."""
    head_dim: int
    width: int
    """Columns of a block: head_dim, padded."""
    quantized: bool
    table_width: int
    operand: jnp.dtype
    """Of what products are taken of."""
    soft_cap: float
    scale: float


def load_rows(ref, row, known, geometry: Geometry, column: int = 0):
    """`[rows, width]` of a `[*, W]` array: head_dim columns from `column` on; zeros elsewhere and where not `known`."""
    columns, mask = _columns(row, known, geometry)
    return pltriton.load(ref.at[_spread(row, geometry), columns + column], mask=mask, other=0)


def store_rows(ref, row, known, values, geometry: Geometry) -> None:
    columns, mask = _columns(row, known, geometry)
    pltriton.store(ref.at[_spread(row, geometry), columns], values.astype(ref.dtype), mask=mask)


def fold_pages(
    q_md, position, bounds, window, layer, row, kv_head, table, pool, geometry: Geometry, block: int
):
    """Attention of `[M, width]` queries to the positions `[first, last)` of a row's pages, none of which is outside.

    position: i32 `[M]` of each query; bounds: (first, last). Returns f32 `[M, width]`, and f32 `[M]`: log2 of the sum
    of the weights, `LOWEST` or so where there are none.
    """
    first, last = bounds
    q_md = q_md.astype(geometry.operand)

    def fold(step, carry):
        top, total, mixed = carry
        kv_position = step * block + jnp.arange(block)
        inside = (kv_position >= first) & (kv_position < last)
        entry = jnp.where(inside, row * geometry.table_width + kv_position // geometry.page_size, 0)
        page = pltriton.load(table.at[entry], mask=inside, other=0)
        slot = (page * geometry.layers + layer) * geometry.page_size + kv_position % geometry.page_size
        kv_row = slot * geometry.kv_heads + kv_head

        keys = _operand(load_rows(pool, kv_row, inside, geometry), geometry)
        scores = _dot(q_md, keys, transpose=True)
        if geometry.quantized:
            scores *= _scales(pool, kv_row, inside, 0)[None, :]
        scores = _capped(scores, geometry)
        seen = inside[None, :] & (kv_position[None, :] <= position[:, None])
        seen &= (window <= 0) | (kv_position[None, :] > position[:, None] - window)
        scores = jnp.where(seen, scores, LOWEST)

        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        keep = jnp.exp2(top - new_top)
        total = total * keep + jnp.sum(weights, axis=1)
        if geometry.quantized:
            weights *= _scales(pool, kv_row, inside, 1)[None, :]
        values = _operand(load_rows(pool, kv_row, inside, geometry, column=geometry.head_dim), geometry)
        mixed = mixed * keep[:, None] + _dot(weights.astype(geometry.operand), values)
        return new_top, total, mixed

    rows = q_md.shape[0]
    empty = (
        jnp.full(rows, LOWEST, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, geometry.width), jnp.float32),
    )
    top, total, mixed = lax.fori_loop(first // block, pl.cdiv(last, block), fold, empty)
    total = jnp.where(total > 0, total, 1.0)
    return mixed / total[:, None], top + jnp.log2(total)


def decode_codes(codes):
    """`quant.decode` in five instructions: without its conversion from integers, which GPUs do at a quarter of the rate.

    Rebiased as if it were normal, a code reads as n. Below the normal ones, at exponent 0, that is (1 + m/8) * 2**-7
    where m/8 * 2**-6 = 2n - 2**-6 is meant, the lesser of the two; for normal ones n is.
    """
    codes = codes.astype(jnp.int32)
    normal = lax.bitcast_convert_type(((codes & 0x7F) << 20) + (120 << 23), jnp.float32)
    magnitude = jnp.minimum(normal, 2 * normal - 2.0**-6)
    bits = lax.bitcast_convert_type(magnitude, jnp.int32) | ((codes & 0x80) << 24)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _columns(row, known, geometry: Geometry):
    shape = (row.shape[0], geometry.width)
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(known[:, None], shape)
    if geometry.width != geometry.head_dim:
        mask &= columns < geometry.head_dim
    return columns, mask


def _spread(row, geometry: Geometry):
    return jnp.broadcast_to(row[:, None], (row.shape[0], geometry.width))


def _operand(block, geometry: Geometry):
    """Codes of 8-bit KV are exact in bf16; their scales wait for the product."""
    return (decode_codes(block) if geometry.quantized else block).astype(geometry.operand)


def _scales(pool, row, inside, which: int):
    """f32 `[N]`: the bf16 scales of K (0) or V (1) behind the codes, put together from their two bytes."""
    column = pool.shape[1] - SCALE_BYTES + 2 * which
    low, high = (
        pltriton.load(pool.at[row, jnp.full(row.shape, column + byte)], mask=inside, other=0).astype(
            jnp.int32
        )
        for byte in (0, 1)
    )
    return lax.bitcast_convert_type((high << 24) | (low << 16), jnp.float32)


def _capped(scores, geometry: Geometry):
    """Scaled, capped, and ready for powers of two instead of e."""
    if not geometry.soft_cap:
        return scores * (geometry.scale * _LOG2_E)
    # tanh by way of the exponential, which every version has; saturates at both ends.
    doubled = scores * (2 * geometry.scale / geometry.soft_cap)
    tanh = 1 - 2 / (1 + jnp.exp2(doubled * _LOG2_E))
    return tanh * (geometry.soft_cap * _LOG2_E)


def _dot(a, b, transpose: bool = False) -> jax.Array:
    """f32 product; of f32 operands without the rounding to 19 bits that matrix units would do."""
    contract = (((1,), (1 if transpose else 0,)), ((), ()))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)
