"""The product of activations with a weight, in XLA."""

from __future__ import annotations

import jax
from jax import lax


def linear(x_ti: jax.Array, weight_oi: jax.Array) -> jax.Array:
    """`x @ weight.T`; weights are stored `[out, in]`, the order in which a matrix-vector product streams memory."""
    return lax.dot_general(x_ti, weight_oi, (((1,), (1,)), ((), ())))
