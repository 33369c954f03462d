"""Takes one KV head out of a block of pages in VMEM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..pages import PoolShape
from ..quant import SCALE_BYTES, decode


class HeadReader(NamedTuple):
    """Reads f32 `[tokens, 2 * head_dim]` of a KV head, zero from token `seen` on: what lies there may be anything,
    and a weight of zero times infinity is no zero.

    Registers hold 32-bit words, in which 16-bit values of two heads lie side by side, or 8-bit ones of four. Where the
    heads fill whole words, a word is read once and each head takes its bits of it. Only words have an index that may be
    dynamic, so that only these heads are worked on in a loop, whose code compiles faster than that of all heads at once.
    """

    pool: PoolShape
    kv: Any
    """A reference to `[buffers, tokens, kv_heads, row_width]`, without the third axis for a single KV head."""
    slot: jax.Array
    seen: jax.Array

    def for_each_head(self, use: Callable[[jax.Array | int, jax.Array], None]) -> None:
        """Calls `use(head, kv)` for every KV head."""
        heads, packed = self.pool.kv_heads, 4 // jnp.dtype(self.kv.dtype).itemsize
        if heads == 1:
            use(0, self._widened(self.kv[self.slot]))
        elif heads % packed:
            for head in range(heads):
                use(head, self._widened(self.kv[self.slot, :, head, :]))
        else:

            def word(index: jax.Array, _) -> None:
                kv = self.kv if packed == 1 else self.kv.bitcast(jnp.int32)
                words = self._seen(kv[self.slot, :, index, :])
                for i in range(packed):
                    use(index * packed + i, self._part(words, i))

            lax.fori_loop(0, heads // packed, word, None)

    def _widened(self, rows: jax.Array) -> jax.Array:
        """Of a head's rows as they are in the pool."""
        if self.pool.quantized:
            return self._decoded(self._seen(rows.astype(jnp.int32)))
        return self._seen(rows.astype(jnp.float32))

    def _part(self, words: jax.Array, i: int) -> jax.Array:
        """Of the i-th head of i32 words; f32 is a word of its own."""
        if words.dtype == jnp.float32:
            return words
        if self.pool.quantized:
            return self._decoded((words >> 8 * i) & 0xFF)
        # A bf16 is the upper half of an f32.
        return lax.bitcast_convert_type(words << 16 if i == 0 else words & jnp.int32(-(1 << 16)), jnp.float32)

    def _seen(self, rows: jax.Array) -> jax.Array:
        token = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        return jnp.where(token < self.seen, rows, jnp.zeros_like(rows))

    def _decoded(self, codes: jax.Array) -> jax.Array:
        """Of i32 codes `[tokens, 2 * head_dim + SCALE_BYTES]`, see `quant`."""
        values = self.pool.row_width - SCALE_BYTES
        kv, scales = decode(codes[:, :values]), codes[:, values:]
        k_scale, v_scale = (
            lax.bitcast_convert_type(
                (scales[:, i : i + 1] | (scales[:, i + 1 : i + 2] << 8)) << 16, jnp.float32
            )
            for i in (0, 2)
        )
        lane = lax.broadcasted_iota(jnp.int32, kv.shape, 1)
        return kv * jnp.where(lane < self.pool.head_dim, k_scale, v_scale)
