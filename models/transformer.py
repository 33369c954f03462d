"""The Llama-lineage decoder as functional Flax: nnx defines the layers, plain leaves go through one jitted step.

`Layer` and `Trunk` are nnx modules; `Decoder.forward` merges them with the parameters while it is traced, and scans one
layer over all of them. Where some layers have experts and others a plain MLP, the scan's body has both, and runs one: so
the two may come in any order, and no stack of weights is cut into segments. Parameters are the nested dict that `weights.loader.load_params` returns, whose matrices may be of
fewer bits than activations (`pallas_kernels.linear.Weight`); `params["layers"]` is either one dict of stacked leaves `[L, ...]`, or a tuple of L dicts. A scan over stacked leaves copies each layer's
matrices out of the stack on XLA's CPU backend, a third more time for a decode step of one row; with a tuple the scan's
body picks the matrix by `lax.switch`, which passes a pointer, and still compiles as one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..pallas_kernels import experts
from ..pallas_kernels.batch import RaggedBatch
from ..pallas_kernels.kernels import AttentionShape, Kernels, LayerShape
from ..pallas_kernels.linear import Weight
from .config import ModelConfig
from .quantized import take_rows, with_quantized
from .rope import rope_frequencies

Params = dict[str, Any]


class StepTokens(NamedTuple):
    """The flat token axis of a step, padded to T."""

    ids: jax.Array
    """i32 `[T]`."""
    positions: jax.Array
    """i32 `[T]`: index of each token in its sequence."""
    slots: jax.Array
    """i32 `[T]`: where its KV goes (`pages.write_kv`); padding names the scratch page."""


class LayerWeights:
    """The matrices of the layer that a scan is at, wherever they lie, and what is computed with them."""

    def __init__(self, decoder: Decoder, layers: _Layers, leaves: Params, index: jax.Array) -> None:
        """leaves: the layer's part of what is scanned; index: of the layer."""
        self._decoder, self._layers, self._leaves, self._index = decoder, layers, leaves, index

    def project(self, name: str, x_ti: jax.Array) -> jax.Array:
        """The product with the matrix of this name."""
        return self._decoder.combine(name, self._use((name,), self._decoder.kernels.linear, x_ti))

    def mix(self, x_td: jax.Array, choice: experts.Choice) -> jax.Array:
        """The sum of what each token's experts make of it."""
        decoder, names = self._decoder, ("experts_gate_up", "experts_down")
        held = choice._replace(experts=decoder.held_experts(choice.experts))
        config = decoder.config.experts
        assert config is not None
        mixed = partial(experts.mix, grouped=decoder.kernels.grouped_linear, count=config.count)

        def use(x: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
            return mixed(x, held, gate_up, down)

        if names[0] not in self._layers.stacks:
            return decoder.combine(names[1], self._use(names, use, x_td))
        # Those of all layers in a row: a layer's would be copied out for a kernel that reads them.
        every = (
            jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), self._layers.stacks[name])
            for name in names
        )
        first = self._layers.row(names[0], self._index) * config.count
        return decoder.combine(names[1], mixed(x_td, held, *every, first=first))

    def by_layer(self, kinds: tuple[bool, ...], on: Callable, off: Callable, x: jax.Array) -> jax.Array:
        """`on(x)` in layers where `kinds` is true, else `off(x)`."""
        if all(kinds) or not any(kinds):
            return on(x) if all(kinds) else off(x)
        return lax.cond(jnp.asarray(kinds)[self._index], on, off, x)

    def _use(self, names: tuple[str, ...], product: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        """`product(x, *matrices)`."""
        if all(name in self._leaves for name in names):
            return product(x, *(self._leaves[name] for name in names))
        row = self._layers.row(names[0], self._index)
        if names[0] in self._layers.stacks:
            stacks = [self._layers.stacks[name] for name in names]
            return product(x, *(jax.tree.map(lambda leaf: leaf[row], stack) for stack in stacks))
        of_each = zip(*(self._layers.matrices[name] for name in names), strict=True)
        return lax.switch(row, [lambda x, w=w: product(x, *w) for w in of_each], x)


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
        weights: LayerWeights,
    ) -> tuple[jax.Array, jax.Array]:
        c = self.config
        dense = partial(self._dense, weights)
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
        x = rms_norm(x_td, self.leaf("mlp_norm"), c.rms_norm_eps)
        dense_layers = set(c.dense_layers)
        plain = tuple(layer in dense_layers for layer in range(c.num_layers))
        mlp, mixture = partial(self._mlp, weights), partial(self._mixture, weights, _real_rows(batch, rows))
        return x_td + weights.by_layer(plain, mlp, mixture, x), pool

    def _dense(self, weights: LayerWeights, name: str, x: jax.Array) -> jax.Array:
        product, bias = weights.project(name, x), f"{name}_bias"
        return product + self.leaf(bias) if hasattr(self, bias) else product

    def _mlp(self, weights: LayerWeights, x_td: jax.Array) -> jax.Array:
        gate, up = jnp.split(self._dense(weights, "gate_up", x_td), 2, axis=-1)
        return self._dense(weights, "down", jax.nn.silu(gate) * up)

    def _mixture(self, weights: LayerWeights, real_t: jax.Array, x_td: jax.Array) -> jax.Array:
        e = self.config.experts
        assert e is not None
        # In f32, whatever activations are: experts of nearly equal weight are not to change places by rounding.
        logits = weights.project("router", x_td.astype(jnp.float32))
        choice = experts.route(logits, e.per_token, normalized=e.normalized)
        # Rows of padding go to no expert.
        chosen = jnp.where(real_t[:, None], choice.experts, -1)
        return weights.mix(x_td, choice._replace(experts=chosen))


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
        self.kernels = with_quantized(kernels)
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
        x, pool = self._run_layers(params["layers"], x, pool, rotary, tokens, batch)
        trunk = nnx.merge(self._trunk_def, _fill(self._trunk_state, params))
        return trunk(x), pool

    def _run_layers(
        self,
        params: Any,
        x: jax.Array,
        pool: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        tokens: StepTokens,
        batch: RaggedBatch,
    ) -> tuple[jax.Array, jax.Array]:
        config = self.config
        windows = tuple(config.window(layer) for layer in range(config.num_layers))
        if self._in_one_call(params, len(x)):
            assert self.kernels.layers is not None
            shape = LayerShape(config.num_heads, config.head_dim, config.rms_norm_eps, windows)
            return self.kernels.layers(x, pool, params, shape, rotary, tokens.slots, batch)
        layers = _Layers(params, config)

        def body(carry, xs):
            x, pool = carry
            index, window, leaves = xs
            module = nnx.merge(self._layer_def, _fill(self._layer_state, leaves))
            weights = LayerWeights(self, layers, leaves, index)
            x, pool = module(x, pool, index, window, rotary, tokens, batch, self.kernels, weights)
            return (x, pool), None

        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        xs = (indices, jnp.asarray(windows, jnp.int32), layers.scanned)
        (x, pool), _ = lax.scan(body, (x, pool), xs)
        return x, pool

    def _in_one_call(self, params: Any, rows: int) -> bool:
        """Whether the kernels take all layers at once."""
        plain = self.config.experts is None and self.dtype == jnp.float32 and isinstance(params, tuple)
        return plain and self.kernels.layers is not None and self.kernels.layers.serves(rows, params)

    def embed(self, params: Params, ids_t: jax.Array) -> jax.Array:
        """Rows of the embedding `[T, D]`."""
        return take_rows(params["embed"], ids_t, self.dtype)

    def combine(self, name: str, product_to: jax.Array) -> jax.Array:
        """What `x @ matrix.T` comes to, for the layer's matrix `name`; a decoder that holds a share adds up here."""
        return product_to

    def held_experts(self, chosen_tk: jax.Array) -> jax.Array:
        """The experts of these numbers as `params` have them; a decoder that holds a share has other numbers."""
        return chosen_tk

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


class _Layers:
    """Parameters of layers, sorted by how a scan comes by those of the layer that it is at."""

    def __init__(self, layers: Any, config: ModelConfig) -> None:
        self._config = config
        self.matrices: dict[str, tuple[Weight, ...]] = {}
        """One for each layer that has it: to be picked."""
        self.stacks: dict[str, Weight] = {}
        """The same in the stacked form, of experts, and of what not all layers have."""
        self.scanned: Params = {}
        """Leaves `[L, ...]`."""
        for name in config.layer_shapes():
            holders = config.layers_with(name)
            if isinstance(layers, tuple):
                of_each = tuple(layers[layer][name] for layer in holders)
                if of_each[0].ndim > 1:
                    self.matrices[name] = of_each
                else:
                    self.scanned[name] = jnp.stack(of_each)
            else:
                scanned = len(holders) == config.num_layers and not name.startswith("experts_")
                (self.scanned if scanned else self.stacks)[name] = layers[name]

    def row(self, name: str, layer: jax.Array) -> jax.Array:
        """The layer's place among those that have the parameter."""
        holders = self._config.layers_with(name)
        if len(holders) == self._config.num_layers:
            return layer
        places = [sum(holder < index for holder in holders) for index in range(self._config.num_layers)]
        return jnp.asarray(places, jnp.int32)[layer]


def _real_rows(batch: RaggedBatch, rows: int) -> jax.Array:
    """bool `[T]`: which rows of a step are no padding."""
    return jnp.arange(rows, dtype=jnp.int32) < batch.q_starts[batch.num_rows]


def _fill(state: nnx.State, leaves: Params) -> nnx.State:
    """A copy of an abstract state with the vectors among these leaves in it; the rest stays abstract, and is not read."""
    filled = jax.tree.map(lambda leaf: leaf, state)
    for name in filled:
        if name in leaves and leaves[name].ndim == 1:
            filled[name] = filled[name].replace(leaves[name])
    return filled
