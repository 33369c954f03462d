"""Weights of few bits in an accelerator's memory, by qwix: its arrays are leaves of the parameters' tree.

A matrix has a scale per row, so that the product is taken with the codes themselves and scaled behind; int4 has one for
each `INT4_TILE` columns of a row, and is unpacked in front of the product. qwix is an optional dependency, imported when
there is something to quantise. (On CPUs int8 weights are `pallas_kernels.linear.QuantizedMatrix`, and need none of this.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..pallas_kernels.experts import layer_experts
from ..pallas_kernels.kernels import Kernels
from ..pallas_kernels.linear import Weight
from ..pallas_kernels.linear import take_rows as take_plain_rows
from .errors import ModelError

TYPES = {"int8-rows": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4}
"""Name -> what codes are."""
INT4_TILE = 64
_BY_ROWS = (((1,), (1,)), ((), ()))


def is_quantized(weight: Any) -> bool:
    """Whether it is one of qwix's arrays."""
    return hasattr(weight, "qvalue")


def quantize(weight_oi: jax.Array, kind: str) -> Any:
    """A qwix array of a matrix `[..., O, I]`, f32 or bf16; kind: of `TYPES`.

    A row's largest number (int4: a tile's) becomes the largest code. Raises `ModelError` where qwix is not installed.
    """
    qwix = load_qwix(kind)
    before = tuple(range(weight_oi.ndim - 1))
    tiled = kind == "int4" and weight_oi.shape[-1] % INT4_TILE == 0
    tiles = {weight_oi.ndim - 1: INT4_TILE} if tiled else {}
    return qwix.quantize(
        weight_oi.astype(jnp.float32), TYPES[kind], channelwise_axes=before, tiled_axes=tiles
    )


def load_qwix(kind: str) -> Any:
    """The module; `ModelError` says how it is installed."""
    try:
        import qwix
    except ImportError:
        raise ModelError(f"{kind} weights need qwix: pip install 'tierax[quant]'") from None
    return qwix


def with_quantized(kernels: Kernels) -> Kernels:
    """The same kernels, which take quantised weights as well."""

    def linear(x_ti: jax.Array, weight_oi: Weight) -> jax.Array:
        return _linear(x_ti, weight_oi) if is_quantized(weight_oi) else kernels.linear(x_ti, weight_oi)

    def grouped(
        x_mi: jax.Array, weight_goi: Weight, sizes_e: jax.Array, first: jax.Array | int = 0
    ) -> jax.Array:
        if is_quantized(weight_goi):
            # One layer's experts are unpacked for the kernel.
            weight_goi = dequantize(layer_experts(weight_goi, len(sizes_e), first), x_mi.dtype)
            first = 0
        return kernels.grouped_linear(x_mi, weight_goi, sizes_e, first)

    return kernels._replace(linear=linear, grouped_linear=grouped)


def dequantize(weight: Any, dtype: jnp.dtype) -> jax.Array:
    """The plain matrix; axes before `[O, I]` are kept."""
    import qwix

    return qwix.dequantize(weight.astype(dtype))


def take_rows(weight_oi: Weight, ids_t: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """See `linear.take_rows`."""
    if not is_quantized(weight_oi):
        return take_plain_rows(weight_oi, ids_t, dtype)
    return dequantize(jax.tree.map(lambda part: part[ids_t], weight_oi), dtype)


def take_part(weight: Any, source: NDArray[np.int32], axis: int, size: int) -> Any:
    """The elements `source` of a quantised matrix along one axis of `size`; what is past its end becomes zeros.

    Raises `ModelError` where tiles that share a scale would be cut.
    """

    def take(part: jax.Array) -> jax.Array:
        tile = size // part.shape[axis]
        if tile == size > 1:
            return part
        if not _keeps_tiles(source, tile, size):
            raise ModelError(f"weights that share a scale in {tile}s cannot be split over so many devices")
        return jnp.take(part, source[::tile] // tile, axis=axis, mode="fill", fill_value=0)

    return jax.tree.map(take, weight)


def _keeps_tiles(source: NDArray[np.int32], tile: int, size: int) -> bool:
    if len(source) % tile:
        return False
    tiles = source.reshape(-1, tile)
    whole = (tiles[:, 0] % tile == 0) & (tiles == tiles[:, :1] + np.arange(tile)).all(-1)
    return bool((whole | (tiles >= size).all(-1)).all())


def _linear(x_ti: jax.Array, weight_oi: Any) -> jax.Array:
    import qwix

    if weight_oi.scale.shape[1] > 1:
        weight_oi = weight_oi.astype(x_ti.dtype)
    return qwix.dot_general(x_ti, weight_oi, _BY_ROWS).astype(x_ti.dtype)
