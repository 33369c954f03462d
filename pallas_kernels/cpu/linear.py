"""The product of activations with a weight, by the native library."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import linear as in_xla
from ..linear import QuantizedMatrix, Weight

MOST_ROWS = 128
"""Of activations against a weight in f32: with more, XLA's own product is faster (at 256 and 512 rows by 12 to 25 % on two
Zen 3 cores). A weight that XLA would convert first is always better off here."""


def linear(x_ti: jax.Array, weight_oi: Weight) -> jax.Array:
    """See `linear.linear`. Activations enter as f32."""
    if (
        x_ti.shape[0] > MOST_ROWS
        and not isinstance(weight_oi, QuantizedMatrix)
        and weight_oi.dtype == jnp.float32
    ):
        return in_xla.linear(x_ti, weight_oi)
    return exact_linear(x_ti, weight_oi)


def exact_linear(x_ti: jax.Array, weight_oi: Weight) -> jax.Array:
    """The same, but a row of the result depends to the bit on its row of activations alone, however many are beside it."""
    operands = weight_oi if isinstance(weight_oi, QuantizedMatrix) else (weight_oi,)
    shape = jax.ShapeDtypeStruct((x_ti.shape[0], weight_oi.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("tierax_linear", shape)(x_ti.astype(jnp.float32), *operands).astype(x_ti.dtype)
