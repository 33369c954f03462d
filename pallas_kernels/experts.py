"""A mixture of experts: small MLPs, of which each token meets a few.

Tokens are sorted by expert, so that the rows of one lie side by side; two grouped products run over them all, each with
as many rows per expert as there are. Nothing is dropped and no expert has a capacity: what a token gets depends on the
token alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .kernels import GroupedLinear
from .linear import QuantizedMatrix, Weight, dequantize


class Choice(NamedTuple):
    """Where tokens go."""

    experts: jax.Array
    """i32 `[T, k]`; a number that is none of an expert's stands for none: the row costs and adds nothing."""
    weights: jax.Array
    """f32 `[T, k]`."""


def route(logits_te: jax.Array, per_token: int, *, normalized: bool) -> Choice:
    """The experts of largest probability under a softmax over all of them, f32 `[T, E]`; of equals the first."""
    weights, experts = lax.top_k(jax.nn.softmax(logits_te, axis=-1), per_token)
    if normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    return Choice(experts, weights)


def mix(
    x_td: jax.Array,
    choice: Choice,
    gate_up_god: Weight,
    down_gdi: Weight,
    grouped: GroupedLinear,
    *,
    count: int,
    first: jax.Array | int = 0,
) -> jax.Array:
    """`[T, D]` in x's dtype: the sum of each token's experts' outputs, weighted.

    gate_up: `[G, 2 * I, D]`; down: `[G, D, I]`; the layer's experts are `count` of them from `first` on. grouped: the
    product, see `kernels.GroupedLinear`.
    """
    tokens, per_token = choice.experts.shape
    chosen = choice.experts.reshape(-1)
    held = (chosen >= 0) & (chosen < count)
    chosen = jnp.where(held, chosen, count)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    sizes = jnp.zeros(count, jnp.int32).at[chosen].add(1, mode="drop")

    gate, up = jnp.split(grouped(x_td[order // per_token], gate_up_god, sizes, first), 2, axis=-1)
    out = grouped(jax.nn.silu(gate) * up, down_gdi, sizes, first)

    # A gather, not a scatter that adds: sums are taken in one order, whatever else is in the batch.
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    out_tkd = out[place].reshape(tokens, per_token, -1).astype(jnp.float32)
    weighted = jnp.where(held.reshape(tokens, per_token, 1), out_tkd * choice.weights[..., None], 0)
    return weighted.sum(1).astype(x_td.dtype)


def layer_experts(weight_goi: Weight, count: int, first: jax.Array | int) -> Weight:
    """`count` matrices from `first` on."""
    if weight_goi.shape[0] == count:
        return weight_goi
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, count), weight_goi)


def ragged_linear(
    x_mi: jax.Array, weight_goi: Weight, sizes_e: jax.Array, first: jax.Array | int = 0
) -> jax.Array:
    """The grouped product by XLA's own `ragged_dot`, the plainest form; see `kernels.GroupedLinear`.

    It serves no backend: those for CPUs and GPUs multiply every row by every expert, and that for TPUs copies the experts
    twice, out of the stack of layers and into another order (404 MB beside a step of Qwen3-30B-A3B on four v6e).
    """
    weight = layer_experts(weight_goi, len(sizes_e), first)
    matrix = dequantize(weight) if isinstance(weight, QuantizedMatrix) else weight
    return lax.ragged_dot_general(x_mi, matrix.astype(x_mi.dtype), sizes_e, _BY_ROWS)


_BY_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def looped_linear(
    x_mi: jax.Array,
    weight_goi: Weight,
    sizes_e: jax.Array,
    first: jax.Array | int = 0,
    *,
    most_rows: int = 16,
) -> jax.Array:
    """The same, block by block of at most `most_rows` rows of one expert.

    For 32 experts of 768 x 1,024 on two Zen 3 cores, 4 of them per token, it took, this way and by `ragged_dot`, in ms: 1
    token 1.4 and 89, 8 tokens 6 and 113, 64 tokens 21 and 194, 512 tokens 100 and 1,199. (A gather of the experts' matrices
    for each row: 1.3 for 1 token, 52 for 8.)
    """
    rows, count = x_mi.shape[0], len(sizes_e)
    # About as many rows as an expert has, if they come evenly.
    block = min(most_rows, 1 << max(rows // count, 1).bit_length() - 1)
    ends = jnp.cumsum(sizes_e)
    blocks = (sizes_e + block - 1) // block
    block_ends = jnp.cumsum(blocks)
    padded = jnp.pad(x_mi, ((0, block), (0, 0)))

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
        nth = index - (block_ends[expert] - blocks[expert])
        start = ends[expert] - sizes_e[expert] + nth * block
        matrix = jax.tree.map(lambda leaf: leaf[first + expert], weight_goi)
        matrix = dequantize(matrix) if isinstance(matrix, QuantizedMatrix) else matrix
        x = lax.dynamic_slice_in_dim(padded, start, block)
        product = lax.dot_general(x, matrix.astype(x.dtype), (((1,), (1,)), ((), ())))
        before = lax.dynamic_slice_in_dim(out, start, block)
        own = (jnp.arange(block, dtype=jnp.int32) < ends[expert] - start)[:, None]
        return lax.dynamic_update_slice_in_dim(out, jnp.where(own, product, before), start, 0)

    out = jnp.zeros((rows + block, weight_goi.shape[1]), x_mi.dtype)
    return lax.fori_loop(0, block_ends[-1], body, out)[:rows]
