"""All layers of a dense model by one call of the native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..batch import RaggedBatch
from ..kernels import LayerShape
from ..linear import QuantizedMatrix
from .linear import MOST_ROWS

_IN_ORDER = (
    "attn_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "o",
    "o_bias",
    "mlp_norm",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
)
"""A layer's parameters as the library reads them."""
_MATRICES = ("qkv", "o", "gate_up", "down")


class NativeLayers:
    """See `kernels.Layers`.

    A decode step of one row is bounded by reading weights, in some hundred products of a fraction of a millisecond each:
    between two of them XLA takes tens of microseconds for what the library does in one.
    """

    def __init__(self, *, exact: bool) -> None:
        """exact: to serve steps of any size, see `linear.exact_linear`; else where its products are the fastest."""
        self._exact = exact

    def serves(self, rows: int, layers: Sequence[dict[str, Any]]) -> bool:
        matrices = [_matrix(layer[name]) for layer in layers for name in _MATRICES]
        if any(matrix is None for matrix in matrices):
            return False
        names = {matrix.dtype.name for matrix in matrices if matrix is not None}
        return names <= MOST_ROWS.keys() and (self._exact or rows <= min(MOST_ROWS[name] for name in names))

    def __call__(
        self,
        x_td: jax.Array,
        pool: jax.Array,
        layers: Sequence[dict[str, Any]],
        shape: LayerShape,
        rotary: tuple[jax.Array, jax.Array],
        slots_t: jax.Array,
        batch: RaggedBatch,
    ) -> tuple[jax.Array, jax.Array]:
        cos_tr, sin_tr = rotary
        first = layers[0]
        call = jax.ffi.ffi_call(
            "tierax_layers",
            (jax.ShapeDtypeStruct(x_td.shape, x_td.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
            input_output_aliases={1: 1},
        )
        x, pool = call(
            x_td,
            pool,
            slots_t,
            cos_tr,
            sin_tr,
            batch.q_starts,
            batch.kv_lens,
            batch.page_table,
            batch.num_rows,
            jnp.asarray(shape.windows, jnp.int32),
            *(part for layer in layers for part in _parts(layer)),
            heads=np.int64(shape.heads),
            head_dim=np.int64(shape.head_dim),
            inner=np.int64(first["down"].shape[1]),
            eps=np.float32(shape.eps),
            qk_norm="q_norm" in first,
            qkv_bias="qkv_bias" in first,
            o_bias="o_bias" in first,
            mlp_bias="down_bias" in first,
        )
        return x, pool


def _parts(layer: dict[str, Any]) -> list[jax.Array]:
    parts: list[jax.Array] = []
    for name in _IN_ORDER:
        if name in layer:
            leaf = layer[name]
            # Vectors may be stored in few bits; matrices are read as they are.
            parts += (
                leaf
                if isinstance(leaf, QuantizedMatrix)
                else [leaf.astype(jnp.float32) if leaf.ndim == 1 else leaf]
            )
    return parts


def _matrix(weight: Any) -> jax.Array | None:
    """What the library reads of a weight; None for a kind that it does not know."""
    if isinstance(weight, QuantizedMatrix):
        return weight.codes
    return weight if isinstance(weight, jax.Array) else None
