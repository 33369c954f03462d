"""The grouped product of a mixture of experts, by the native library."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..experts import layer_experts
from ..linear import QuantizedMatrix, Weight


def grouped_linear(
    x_mi: jax.Array, weight_goi: Weight, sizes_e: jax.Array, first: jax.Array | int = 0
) -> jax.Array:
    """See `kernels.GroupedLinear`. Activations enter as f32; a row of the result depends to the bit on its row of
    activations and on its expert alone, however many rows that has."""
    weight = layer_experts(weight_goi, len(sizes_e), first)
    operands = weight if isinstance(weight, QuantizedMatrix) else (weight,)
    shape = jax.ShapeDtypeStruct((x_mi.shape[0], weight.shape[1]), jnp.float32)
    product = jax.ffi.ffi_call("tierax_grouped_linear", shape)
    return product(x_mi.astype(jnp.float32), sizes_e, *operands).astype(x_mi.dtype)
