"""The grouped product of a mixture of experts, by the Mosaic kernel that comes with jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox import gmm

from ..experts import layer_experts
from ..linear import QuantizedMatrix, Weight, dequantize

ROWS, COLUMNS = 128, 512
"""Of a tile: of activations, and of a matrix in both directions."""
_SUBLANES = 16
"""Rows of a 16-bit tile."""


def grouped_linear(
    x_mi: jax.Array,
    weight_goi: Weight,
    sizes_e: jax.Array,
    first: jax.Array | int = 0,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `kernels.GroupedLinear`. The kernel reads matrices as they lie, `[out, in]`, and skips groups without rows: those
    of other layers are there, and cost nothing."""
    rows, columns = x_mi.shape
    if isinstance(weight_goi, QuantizedMatrix):
        weight_goi, first = dequantize(layer_experts(weight_goi, len(sizes_e), first)), 0  # pyright: ignore[reportArgumentType]
    matrices = weight_goi.astype(x_mi.dtype)
    groups, outputs, _ = matrices.shape
    if groups != len(sizes_e):
        sizes_e = lax.dynamic_update_slice(jnp.zeros(groups, jnp.int32), sizes_e, (first,))
    tile = min(ROWS, -(-rows // _SUBLANES) * _SUBLANES)
    padded = jnp.pad(x_mi, ((0, -rows % tile), (0, 0)))
    tiling = (tile, min(COLUMNS, columns), min(COLUMNS, outputs))
    return gmm(padded, matrices, sizes_e, x_mi.dtype, tiling, transpose_rhs=True, interpret=interpret)[:rows]
