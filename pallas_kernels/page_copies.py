"""Whole pages out of a pool and into it. Of the pool's layout they know only that its first axis is pages.

Two forms of each, equal in what they do. A loop over single pages runs at the speed of memory on the CPU backend, whose
gather and scatter are far slower; elsewhere one gather or scatter is a single kernel. XLA's CPU backend rewrites the
whole pool for any update in bf16, even of one page, so a bf16 pool takes the second form there, once per batch. On TPUs
the scatter is a loop: for some shapes (8-bit rows of 32 KV heads) XLA would order the pool's axes otherwise for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def takes_loop(platform: str, dtype: jnp.dtype) -> bool:
    """Whether the loops are the form for a pool of `dtype` on `platform`."""
    return platform == "cpu" and dtype != jnp.bfloat16


def wire_dtype(platform: str, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of pages on their way: the pool's, unless arithmetic in that would not keep every bit."""
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def gather_loop(pool: jax.Array, block: jax.Array, pages_n: jax.Array, count: jax.Array) -> jax.Array:
    """Copies `count` pages into the first rows of `block`, which is `[N, ...page]` and should be donated.

    pages_n: i32 `[N]`; count: i32 `[]`, up to N, so that one program serves all batches.
    """

    def copy(i: jax.Array, block: jax.Array) -> jax.Array:
        page = lax.dynamic_slice_in_dim(pool, pages_n[i], 1)
        return lax.dynamic_update_slice_in_dim(block, page, i, 0)

    return lax.fori_loop(0, count, copy, block)


def scatter_loop(
    pool: jax.Array, staged: jax.Array, pages_n: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Copies the first `count` rows of `staged`, `[N, ...page]`, into their pages, in place when `pool` is donated.

    Also returns a small array that is ready when `staged` has been read.
    """

    def copy(i: jax.Array, pool: jax.Array) -> jax.Array:
        page = lax.dynamic_slice_in_dim(staged, i, 1)
        return lax.dynamic_update_slice_in_dim(pool, page, pages_n[i], 0)

    return lax.fori_loop(0, count, copy, pool), count + 1


def gather_rows(pool: jax.Array, pages_n: jax.Array, wire: jnp.dtype) -> jax.Array:
    """N pages as `[N, ...page]` of `wire`, which is as wide as the pool's dtype."""
    return _cast(pool.at[pages_n].get(mode="promise_in_bounds"), wire)


def scatter_rows(pool: jax.Array, staged: jax.Array, pages_n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The counterpart of `gather_rows`; pages other than scratch are distinct. The second result as `scatter_loop`'s."""
    wire = _cast(pool, staged.dtype).at[pages_n].set(staged, mode="promise_in_bounds")
    return _cast(wire, pool.dtype), pages_n[:1] + 1


def _cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
