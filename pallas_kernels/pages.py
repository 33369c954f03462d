"""The device pool's layout and the few functions that may know it.

A pool is `[pages + 1, layers, page_size, kv_heads, 2 * head_dim]`: a page holds the K and V of all layers for its
tokens (K in the first half of the last axis, V in the second) and is one contiguous block, as in every other tier.
The last page is scratch: padding tokens write there. (Dropping their writes instead would make a one-token update
conditional, and XLA's CPU backend then copies the whole pool in every layer.)

A pool of f32 or bf16 holds values; one of u8 holds 8-bit codes and, behind them in the last axis, the scales of that
token and head (see `quant`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from .kernels import Target
from .quant import SCALE_BYTES, dequantize_kv, quantize_kv


class PoolShape(NamedTuple):
    """Sizes of a device pool."""

    pages: int
    layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    quantized: bool = False
    """8-bit KV, whose array is u8."""

    @property
    def array(self) -> tuple[int, ...]:
        """Of the pool's array. A single KV head has no axis: XLA's CPU backend would give such a pool another layout
        inside the scan over layers, and copy it in and out of every step."""
        heads = () if self.kv_heads == 1 else (self.kv_heads,)
        return (self.pages + 1, self.layers, self.page_size, *heads, self.row_width)

    @classmethod
    def of(cls, pool: jax.Array) -> PoolShape:
        """The sizes of a pool's array."""
        pages, layers, page_size, *heads, width = pool.shape
        quantized = pool.dtype == jnp.uint8
        head_dim = (width - SCALE_BYTES if quantized else width) // 2
        return cls(pages - 1, layers, page_size, heads[0] if heads else 1, head_dim, quantized)

    @property
    def row_width(self) -> int:
        """Elements of the last axis: K and V of one token and head, and their scales."""
        return 2 * self.head_dim + (SCALE_BYTES if self.quantized else 0)

    @property
    def page_elements(self) -> int:
        return self.layers * self.page_size * self.kv_heads * self.row_width


def pool_format(target: Target, sharding: Sharding, array: tuple[int, ...]) -> Format | None:
    """How a pool's array is to lie in memory, as argument and as result of every program; None: as the compiler likes.

    TPU kernels read it in row-major order. XLA would order the axes of 3 KV heads or of 8-bit rows otherwise, and then
    copy the whole pool into and out of each program.
    """
    return Format(Layout(tuple(range(len(array)))), sharding) if target.platform == "tpu" else None


def page_bytes_on_device(shape: PoolShape, dtype: jnp.dtype, layout: Format | None) -> int:
    """Bytes that one page takes, with the padding of the device that `layout` names: a TPU's memory is in tiles, of 128
    elements of the last axis. Without a layout there is no padding."""
    if layout is None:
        return shape.page_elements * jnp.dtype(dtype).itemsize
    few = shape._replace(pages=127)
    memory = (
        jax.jit(lambda: jnp.zeros(few.array, dtype), out_shardings=layout).lower().compile().memory_analysis()
    )
    assert memory is not None, "the compiler tells no sizes"
    return -(-memory.output_size_in_bytes // (few.pages + 1))


def write_kv(
    pool: jax.Array, k_tkd: jax.Array, v_tkd: jax.Array, slots_t: jax.Array, layer: jax.Array | int
) -> jax.Array:
    """Stores one layer's K and V of T tokens, in place when `pool` is donated.

    k_tkd, v_tkd: `[T, kv_heads, head_dim]`; slots_t: i32 `[T]`, `page * page_size + offset`; real tokens'
    are distinct and in range (the host checks), padding names the scratch page.
    """
    shape = PoolShape.of(pool)
    page_size, row = shape.page_size, shape.kv_heads * shape.row_width
    rows = pool.reshape(-1, row)
    page, offset = slots_t // page_size, slots_t % page_size
    index = (page * shape.layers + layer) * page_size + offset
    if shape.quantized:
        kv = quantize_kv(k_tkd, v_tkd).reshape(-1, row)
    else:
        kv = jnp.concatenate([k_tkd, v_tkd], axis=-1).astype(pool.dtype).reshape(-1, row)
    if index.shape[0] == 1:
        # A scatter of one row is lowered to a fused dynamic-update-slice, for which XLA's CPU backend copies the pool.
        scratch = rows.shape[0] - 1
        index = jnp.concatenate([index, jnp.full(1, scratch, index.dtype)])
        kv = jnp.concatenate([kv, jnp.zeros_like(kv)])
    return rows.at[index].set(kv, mode="promise_in_bounds", unique_indices=True).reshape(pool.shape)


def gather_layer(pool: jax.Array, pages_n: jax.Array, layer: jax.Array | int) -> jax.Array:
    """KV rows of one layer for N pages: `[N * page_size, kv_heads, 2 * head_dim]`, 8-bit KV decoded to f32."""
    shape = PoolShape.of(pool)
    blocks = pool.reshape((shape.pages + 1) * shape.layers, -1)
    rows = blocks[pages_n * shape.layers + layer].reshape(-1, shape.kv_heads, shape.row_width)
    return dequantize_kv(rows) if shape.quantized else rows
