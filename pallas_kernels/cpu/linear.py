"""The product of activations with a weight, by the native library."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import linear as in_xla
from ..linear import QuantizedMatrix, Weight

MOST_ROWS = {"float32": 128, "bfloat16": 128, "int8": 32}
"""Of activations, by the weight's dtype: with more, XLA's own product is faster, even if it converts the weight first. For all
matrices of SmolLM2-135M's layers on two Zen 3 cores it took, native and XLA, in ms: f32 at 64 rows 117 and 134, at 128 257
and 245, at 256 441 and 377; bf16 at 128 248 and 263, at 256 486 and 460; int8 at 32 82 and 81, at 64 160 and 129."""


def linear(x_ti: jax.Array, weight_oi: Weight) -> jax.Array:
    """See `linear.linear`. Activations enter as f32."""
    matrix = weight_oi.codes if isinstance(weight_oi, QuantizedMatrix) else weight_oi
    product = in_xla.linear if x_ti.shape[0] > MOST_ROWS[matrix.dtype.name] else exact_linear
    return product(x_ti, weight_oi)


def exact_linear(x_ti: jax.Array, weight_oi: Weight) -> jax.Array:
    """The same, but a row of the result depends to the bit on its row of activations alone, however many are beside it."""
    operands = weight_oi if isinstance(weight_oi, QuantizedMatrix) else (weight_oi,)
    shape = jax.ShapeDtypeStruct((x_ti.shape[0], weight_oi.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("tierax_linear", shape)(x_ti.astype(jnp.float32), *operands).astype(x_ti.dtype)
