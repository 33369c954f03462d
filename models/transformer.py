"""The Llama-lineage decoder as functional Flax: nnx defines the layers, plain leaves go through one jitted step.

`Layer` and `Trunk` are nnx modules; `Decoder.forward` merges them with the parameters while it is traced, and scans one
layer over all of them. Parameters are the nested dict that `weights.loader.load_params` returns, whose matrices may be of
fewer bits than activations (`pallas_kernels.linear.Weight`); `params["layers"]` is either one dict of stacked leaves `[L, ...]`, or a tuple of L dicts. A scan over stacked leaves copies each layer's
matrices out of the stack on XLA's CPU backend, a third more time for a decode step of one row; with a tuple the scan's
body picks the matrix by `lax.switch`, which passes a pointer, and still compiles as one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..pallas_kernels.batch import RaggedBatch
from ..pallas_kernels.kernels import AttentionShape, Kernels
from ..pallas_kernels.linear import take_rows
from .config import ModelConfig
from .rope import rope_frequencies

Params = dict[str, Any]

Project = Callable[[str, jax.Array], jax.Array]
"""`project(name, x_ti) -> x_to`: the product with the layer's matrix of that name."""


class StepTokens(NamedTuple):
    """The flat token axis of a step, padded to T."""

    ids: jax.Array
    """i32 `[T]`."""
    positions: jax.Array
    """i32 `[T]`: index of each token in its sequence."""
    slots: jax.Array
    """i32 `[T]`: where its KV goes (`pages.write_kv`); padding names the scratch page."""


class _Block(nnx.Module):
    """A module whose parameters come from a table of shapes. It reads its vectors; matrices are used from outside."""

    def __init__(self, config: ModelConfig, shapes: dict[str, tuple[int, ...]], dtype: jnp.dtype) -> None:
        self.config = config
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape, dtype)))

    def leaf(self, name: str) -> jax.Array:
        return getattr(self, name)[...]


class Layer(_Block):
    """One decoder layer. Parameter names and shapes are `ModelConfig.layer_shapes`."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        super().__init__(config, config.layer_shapes(), dtype)

    def __call__(
        self,
        x_td: jax.Array,
        pool: jax.Array,
        layer: jax.Array | int,
        window: jax.Array | int,
        rotary: tuple[jax.Array, jax.Array],
        tokens: StepTokens,
        batch: RaggedBatch,
        kernels: Kernels,
        project: Project,
    ) -> tuple[jax.Array, jax.Array]:
        c = self.config

        def dense(name: str, x: jax.Array) -> jax.Array:
            bias = f"{name}_bias"
            return project(name, x) + self.leaf(bias) if hasattr(self, bias) else project(name, x)

        rows = x_td.shape[0]
        qkv = dense("qkv", rms_norm(x_td, self.leaf("attn_norm"), c.rms_norm_eps))
        qkv = qkv.reshape(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = jnp.split(qkv, (c.num_heads, c.num_heads + c.num_kv_heads), axis=1)
        if c.qk_norm:
            q = rms_norm(q, self.leaf("q_norm"), c.rms_norm_eps)
            k = rms_norm(k, self.leaf("k_norm"), c.rms_norm_eps)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        pool = kernels.write_kv(pool, k, v, tokens.slots, layer)
        attended = kernels.attend(q, pool, layer, batch, window=window)
        x_td = x_td + dense("o", attended.reshape(rows, -1))
        gate_up = dense("gate_up", rms_norm(x_td, self.leaf("mlp_norm"), c.rms_norm_eps))
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return x_td + dense("down", jax.nn.silu(gate) * up), pool


class Trunk(_Block):
    """What stands outside the layers: embedding, final norm, output head."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        super().__init__(config, config.top_shapes(), dtype)

    def __call__(self, x_td: jax.Array) -> jax.Array:
        return rms_norm(x_td, self.leaf("final_norm"), self.config.rms_norm_eps)


class Decoder:
    """The model's pure functions. Holds structure only; every array is an argument."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, kernels: Kernels) -> None:
        """dtype: of activations."""
        self.config = config
        self.dtype = dtype
        self.kernels = kernels
        self._layer_def, self._layer_state = nnx.split(nnx.eval_shape(lambda: Layer(config, dtype)))
        self._trunk_def, self._trunk_state = nnx.split(nnx.eval_shape(lambda: Trunk(config, dtype)))
        self._inv_freq, self._rope_scale = rope_frequencies(config.rope, config.head_dim)

    def forward(
        self, params: Params, pool: jax.Array, tokens: StepTokens, batch: RaggedBatch
    ) -> tuple[jax.Array, jax.Array]:
        """Runs all layers over the step's tokens: normalised hidden states `[T, D]`, and the pool with their KV."""
        x = self.embed(params, tokens.ids)
        angles = tokens.positions[:, None].astype(jnp.float32) * self._inv_freq[None]
        rotary = (jnp.cos(angles) * self._rope_scale, jnp.sin(angles) * self._rope_scale)
        matrices, scanned = _split_layers(params["layers"])
        config = self.config
        windows = jnp.asarray([config.window(i) for i in range(config.num_layers)], jnp.int32)

        def body(carry, xs):
            x, pool = carry
            index, window, leaves = xs
            module = nnx.merge(self._layer_def, _fill(self._layer_state, leaves))

            def project(name: str, x: jax.Array) -> jax.Array:
                linear = self.kernels.linear
                if name in leaves:
                    out = linear(x, leaves[name])
                else:
                    out = lax.switch(index, [lambda x, w=w: linear(x, w) for w in matrices[name]], x)
                return self.combine(name, out)

            x, pool = module(x, pool, index, window, rotary, tokens, batch, self.kernels, project)
            return (x, pool), None

        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, pool), _ = lax.scan(body, (x, pool), (indices, windows, scanned))
        trunk = nnx.merge(self._trunk_def, _fill(self._trunk_state, params))
        return trunk(x), pool

    def embed(self, params: Params, ids_t: jax.Array) -> jax.Array:
        """Rows of the embedding `[T, D]`."""
        return take_rows(params["embed"], ids_t, self.dtype)

    def combine(self, name: str, product_to: jax.Array) -> jax.Array:
        """What `x @ matrix.T` comes to, for the layer's matrix `name`; a decoder that holds a share adds up here."""
        return product_to

    def logits(self, params: Params, hidden_sd: jax.Array) -> jax.Array:
        """f32 logits `[S, V]` of normalised hidden states `[S, D]`."""
        head = params["embed" if self.config.tie_embeddings else "lm_head"]
        return self.kernels.linear(hidden_sd, head).astype(jnp.float32)


def attention_shape(config: ModelConfig, page_size: int, dtype: str, kv_dtype: str) -> AttentionShape:
    """What kernels for this model are chosen by. dtype: of activations; kv_dtype: of the pool."""
    return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, page_size, dtype, kv_dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in f32 (Zhang and Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    scaled = x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (scaled * weight).astype(x.dtype)


def rotate(x_thd: jax.Array, cos_tr: jax.Array, sin_tr: jax.Array) -> jax.Array:
    """Rotary position embedding, halves rotated against each other (Su et al., 2021)."""
    x1, x2 = jnp.split(x_thd.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_tr[:, None], sin_tr[:, None]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x_thd.dtype)


def _split_layers(layers: Any) -> tuple[dict[str, tuple[jax.Array, ...]], dict[str, jax.Array]]:
    """Matrices to pick by layer, and leaves `[L, ...]` to scan over; the stacked form has only the latter."""
    if not isinstance(layers, tuple):
        return {}, layers
    matrices = {
        name: tuple(leaves[name] for leaves in layers) for name, leaf in layers[0].items() if leaf.ndim > 1
    }
    vectors = {
        name: jnp.stack([leaves[name] for leaves in layers]) for name in layers[0] if name not in matrices
    }
    return matrices, vectors


def _fill(state: nnx.State, leaves: Params) -> nnx.State:
    """A copy of an abstract state with the vectors among these leaves in it; the rest stays abstract, and is not read."""
    filled = jax.tree.map(lambda leaf: leaf, state)
    for name in filled:
        if name in leaves and leaves[name].ndim == 1:
            filled[name] = filled[name].replace(leaves[name])
    return filled
