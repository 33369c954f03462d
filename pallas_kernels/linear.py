"""Weights, and the product of activations with one, in XLA."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 64
"""Numbers of a row of int8 weights that share a scale: a sixteenth more bytes. (The native library has the same figure.)"""

_LARGEST = 127.0


class QuantizedMatrix(NamedTuple):
    """An int8 weight: `codes * scales`, with one scale per row and `GROUP` of columns; the last group may be short."""

    codes: jax.Array
    """i8 `[O, I]`."""
    scales: jax.Array
    """f32 `[O, ceil(I / GROUP)]`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix: `[O, I]`."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        return self.codes.ndim


Weight = jax.Array | QuantizedMatrix
"""`[O, I]`: f32, bf16 or int8."""


def quantize(weight_oi: jax.Array) -> QuantizedMatrix:
    """Symmetric int8: each group's largest number becomes +-127, the others the nearest code, ties to even.

    weight_oi: f32 or bf16 `[O, I]`, finite; axes before these two (layers) are kept.
    """
    groups = _groups(weight_oi.astype(jnp.float32))
    scales = jnp.abs(groups).max(-1) / _LARGEST
    # A group of zeros has codes of zero, whatever its scale.
    codes = jnp.round(groups / jnp.where(scales > 0, scales, 1.0)[..., None])
    return QuantizedMatrix(_ungroup(codes.astype(jnp.int8), weight_oi.shape[-1]), scales)


def dequantize(weight: QuantizedMatrix) -> jax.Array:
    """f32 `[O, I]`; axes before these two are kept."""
    groups = _groups(weight.codes.astype(jnp.float32))
    return _ungroup(groups * weight.scales[..., None], weight.shape[-1])


def linear(x_ti: jax.Array, weight_oi: Weight) -> jax.Array:
    """`x @ weight.T`, in x's dtype: `[T, I]` f32 or bf16 by `[O, I]` gives `[T, O]`.

    Weights are stored `[out, in]`, the order in which a matrix-vector product streams memory.
    """
    matrix = dequantize(weight_oi) if isinstance(weight_oi, QuantizedMatrix) else weight_oi
    return lax.dot_general(x_ti, matrix.astype(x_ti.dtype), (((1,), (1,)), ((), ())))


def take_rows(weight_oi: Weight, ids_t: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a weight `[T, I]` in `dtype`, as an embedding is looked up. ids_t: i32 `[T]`."""
    if isinstance(weight_oi, QuantizedMatrix):
        return dequantize(QuantizedMatrix(weight_oi.codes[ids_t], weight_oi.scales[ids_t])).astype(dtype)
    return weight_oi[ids_t].astype(dtype)


def _groups(matrix_oi: jax.Array) -> jax.Array:
    """`[O, ceil(I / GROUP), GROUP]`, with zeros behind the last column."""
    *before, columns = matrix_oi.shape
    padded = jnp.pad(matrix_oi, (*((0, 0) for _ in before), (0, -columns % GROUP)))
    return padded.reshape(*before, -1, GROUP)


def _ungroup(groups_ogn: jax.Array, columns: int) -> jax.Array:
    """The opposite of `_groups`."""
    return groups_ogn.reshape(*groups_ogn.shape[:-2], -1)[..., :columns]
