"""The grouped product of a mixture of experts, by the native library."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..linear import QuantizedMatrix, Weight


def grouped_linear(x_mi: jax.Array, weight_eoi: Weight, sizes_e: jax.Array) -> jax.Array:
    """See `kernels.GroupedLinear`. Activations enter as f32; a row of the result depends to the bit on its row of
    activations and on its expert alone, however many rows that has."""
    operands = weight_eoi if isinstance(weight_eoi, QuantizedMatrix) else (weight_eoi,)
    shape = jax.ShapeDtypeStruct((x_mi.shape[0], weight_eoi.shape[1]), jnp.float32)
    product = jax.ffi.ffi_call("tierax_grouped_linear", shape)
    return product(x_mi.astype(jnp.float32), sizes_e, *operands).astype(x_mi.dtype)
