"""Tensor parallelism: a decoder whose weights and KV are split over the devices of a mesh.

The whole forward runs under one `shard_map`: each device runs an ordinary `Decoder` of a smaller model, its share, and
adds up with the others after `o` and `down` (Shoeybi et al., 2019, "Megatron-LM"). So kernels see plain local arrays,
and a layer costs two all-reduces and nothing else. (Attention alone under `shard_map`, the rest left to XLA's partitioner,
costs collective permutes as well: the fused matrix [q; k; v], split evenly, puts no device's q, k and v on one device.)

For that, parameters are rearranged once, when they are loaded (`Shares.rearranged`): rows of `qkv` become
`[q; k; v]` of device 0, then those of device 1 …, likewise `[gate; up]`. Where heads, the inner size or the vocabulary do
not come out even, shares are filled up with rows of zeros, which add nothing; KV heads are replicated when there are
fewer than devices. Experts are held whole, each by one device, which computes the tokens that go to them; what the devices
get is added up. So any model runs on any number of devices, at the price of the filling.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ..pallas_kernels.batch import RaggedBatch
from ..pallas_kernels.kernels import Kernels
from ..pallas_kernels.pages import PoolShape
from .config import ExpertsConfig, ModelConfig
from .quantized import is_quantized, take_part
from .transformer import Decoder, Params, StepTokens


class ShardingRules(NamedTuple):
    """Logical axes -> the mesh axis that they are split over; None: every device holds all of it."""

    heads: str | None = "tp"
    """Query and KV heads, in weights and in the KV pool."""
    mlp: str | None = "tp"
    """The inner size of the MLP."""
    vocab: str | None = "tp"
    """Rows of the embedding and of the output head."""
    experts: str | None = "tp"
    """Whole experts; the router is on every device."""

    def spec(self, *logical: str | None) -> PartitionSpec:
        """Of an array whose axes have these logical names, None for one that is never split."""
        return PartitionSpec(*(None if name is None else getattr(self, name) for name in logical))


_AXES: dict[str, tuple[str | None, ...]] = {
    "qkv": ("heads", None),
    "qkv_bias": ("heads",),
    "o": (None, "heads"),
    "gate_up": ("mlp", None),
    "gate_up_bias": ("mlp",),
    "down": (None, "mlp"),
    "embed": ("vocab", None),
    "lm_head": ("vocab", None),
    "experts_gate_up": ("experts", None, None),
    "experts_down": ("experts", None, None),
}
"""Logical axes of the parameters that are split; the others are on every device."""

_ADDED_UP = {"o": "heads", "down": "mlp", "experts_down": "experts"}
"""Products of which each device has a part of every sum, and the logical axis that it comes from."""


class Shares:
    """Who holds what: the arithmetic of a split, and arrays laid out for it.

    mesh: any mesh that has the axes that `rules` names.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, rules: ShardingRules | None = None) -> None:
        self.config = config
        self.mesh = mesh
        self.rules = rules = ShardingRules() if rules is None else rules
        heads, mlp, vocab, experts = (1 if axis is None else mesh.shape[axis] for axis in rules)
        q_heads, kv_heads = split_heads(config.num_heads, config.num_kv_heads, heads)
        self.kv_heads = kv_heads
        """i32 `[devices, KV heads of a share]`: which heads of the model they are; `config.num_kv_heads` = none."""
        self.share = dataclasses.replace(
            config,
            num_heads=q_heads.shape[1],
            num_kv_heads=kv_heads.shape[1],
            intermediate_size=-(-config.intermediate_size // mlp),
            vocab_size=-(-config.vocab_size // vocab),
            experts=_expert_share(config.experts, experts),
        )
        """The model that one device runs: what its kernels are chosen by."""
        self._sources = _sources(config, q_heads, kv_heads, (mlp, vocab, experts))

    def rearranged(self, params: Params) -> Params:
        """Parameters as `load_params` gives them, in the order of the shares; still whole arrays, or abstract ones.

        Row or column i of the result is `source(name)[i]` of the original.
        """
        return _by_name(params, self.rearrange)

    def rearrange(self, name: str, leaf: Any) -> Any:
        """One parameter of `rearranged`."""
        source = self.source(name)
        if source is None:
            return leaf
        axis = leaf.ndim - len(_AXES[name]) + _split_axis(name)
        if is_quantized(leaf):
            return take_part(leaf, source, axis, leaf.shape[axis])
        return jnp.take(leaf, source, axis=axis, mode="fill", fill_value=0)

    def source(self, name: str) -> NDArray[np.int32] | None:
        """Which rows (`o`, `down`: columns) of a parameter the shares hold, in the order of devices, all equally many.

        The size of that axis stands for a row of zeros. None: the parameter is taken as it is.
        """
        return self._sources.get(name)

    def specs(self, params: Params) -> Params:
        """The partition of rearranged parameters, as a tree of theirs."""
        return _by_name(params, self._spec)

    def split_axis(self, name: str) -> int:
        """The axis of a parameter (of one layer) that `source` counts; 0 for one that is never split."""
        return _split_axis(name) if name in _AXES else 0

    def sharding(self, name: str, leaf: Any) -> Any:
        """Of a rearranged parameter, of which only `ndim` matters; with the stacked layers first, if it has them. For a
        quantised one a tree, of its codes and scales."""
        return jax.tree.map(partial(NamedSharding, self.mesh), self._spec(name, leaf))

    def place(self, params: Params) -> Params:
        """Rearranged parameters, on the devices of the mesh."""
        return jax.device_put(
            params, jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(params))
        )

    def pool_array(self, pages: int, page_size: int, *, quantized: bool = False) -> tuple[int, ...]:
        """Shape of the pool's array over all devices. Each holds a pool of `PoolShape` for its KV heads: one of a single
        head has no axis for it, and then it is the rows that stand side by side."""
        share, layers = self.share, self.config.num_layers
        shape = PoolShape(pages, layers, page_size, share.num_kv_heads, share.head_dim, quantized).array
        return (*shape[:3], shape[3] * len(self.kv_heads), *shape[4:])

    @property
    def pool_spec(self) -> PartitionSpec:
        """The partition of `pool_array`."""
        return self.rules.spec(None, None, None, "heads")

    @property
    def pool_sharding(self) -> NamedSharding:
        """`pool_spec` on the mesh."""
        return NamedSharding(self.mesh, self.pool_spec)

    def _spec(self, name: str, leaf: Any) -> Any:
        logical = _AXES.get(name, ())
        # Stacked layers come first; a parameter that is not split has no names at all.
        names = [*[None] * (leaf.ndim - len(logical)), *logical]
        if not is_quantized(leaf):
            return self.rules.spec(*names)
        # A scale of a whole row is not split with it.
        return jax.tree.map(
            lambda part: self.rules.spec(
                *(name if size > 1 else None for name, size in zip(names, part.shape, strict=True))
            ),
            leaf,
        )


class ShardedDecoder:
    """Has the functions of `Decoder`, over parameters and a pool that `Shares` laid out. Hidden states and logits are on
    every device, so that each samples the same tokens and nothing has to be told."""

    def __init__(self, shares: Shares, dtype: jnp.dtype, kernels: Kernels) -> None:
        """kernels: chosen for `shares.share`."""
        self.config = shares.config
        self._shares = shares
        self._share = _Share(shares, dtype, kernels)

    def forward(
        self, params: Params, pool: jax.Array, tokens: StepTokens, batch: RaggedBatch
    ) -> tuple[jax.Array, jax.Array]:
        """See `Decoder.forward`."""
        everywhere, pool_spec = PartitionSpec(), self._shares.pool_spec
        run = jax.shard_map(
            self._share.forward,
            mesh=self._shares.mesh,
            in_specs=(self._shares.specs(params), pool_spec, everywhere, everywhere),
            out_specs=(everywhere, pool_spec),
            check_vma=False,  # kernels do not say over which axes their results vary
        )
        return run(params, pool, tokens, batch)

    def logits(self, params: Params, hidden_sd: jax.Array) -> jax.Array:
        """See `Decoder.logits`."""
        run = jax.shard_map(
            self._share.logits,
            mesh=self._shares.mesh,
            in_specs=(self._shares.specs(params), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return run(params, hidden_sd)[:, : self.config.vocab_size]


class _Share(Decoder):
    """One device's decoder, within `shard_map`."""

    def __init__(self, shares: Shares, dtype: jnp.dtype, kernels: Kernels) -> None:
        # Products are added up between devices: layers cannot be one call.
        super().__init__(shares.share, dtype, kernels._replace(layers=None))
        self._rules = shares.rules

    def logits(self, params: Params, hidden_sd: jax.Array) -> jax.Array:
        part = super().logits(params, hidden_sd)
        axis = self._rules.vocab
        return part if axis is None else lax.all_gather(part, axis, axis=1, tiled=True)

    def embed(self, params: Params, ids_t: jax.Array) -> jax.Array:
        axis = self._rules.vocab
        if axis is None:
            return super().embed(params, ids_t)
        rows = self.config.vocab_size
        row = ids_t - lax.axis_index(axis) * rows
        here = (row >= 0) & (row < rows)
        found = super().embed(params, jnp.where(here, row, 0))
        return lax.psum(jnp.where(here[:, None], found, 0), axis)

    def combine(self, name: str, product_to: jax.Array) -> jax.Array:
        axis = getattr(self._rules, _ADDED_UP[name]) if name in _ADDED_UP else None
        return product_to if axis is None else lax.psum(product_to, axis)

    def held_experts(self, chosen_tk: jax.Array) -> jax.Array:
        axis, experts = self._rules.experts, self.config.experts
        if axis is None or experts is None:
            return chosen_tk
        # Those of other devices come to lie outside of the share.
        return jnp.where(chosen_tk < 0, -1, chosen_tk - lax.axis_index(axis) * experts.count)


def split_heads(heads: int, kv_heads: int, devices: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Which query and KV heads each device computes: i32 `[devices, n]` each; `heads` and `kv_heads` stand for none.

    The query heads of a device come in equal groups, one for each of its KV heads, as attention wants them. With more
    devices than KV heads, several hold the same one and share out its queries.
    """
    group = heads // kv_heads
    copies = max(1, devices // kv_heads)
    in_group = -(-group // copies)
    per_device = -(-kv_heads * copies // devices)
    slot = np.arange(devices * per_device)
    kv = np.minimum(slot // copies, kv_heads)
    of_group = (slot % copies)[:, None] * in_group + np.arange(in_group)
    q = np.where((of_group < group) & (kv < kv_heads)[:, None], kv[:, None] * group + of_group, heads)
    return q.reshape(devices, -1).astype(np.int32), kv.reshape(devices, -1).astype(np.int32)


def _sources(
    config: ModelConfig,
    q_heads: NDArray[np.int32],
    kv_heads: NDArray[np.int32],
    devices: tuple[int, int, int],
) -> dict[str, NDArray[np.int32]]:
    """See `Shares.source`; devices: those that the MLP, the vocabulary and the experts are split over."""
    mlp, vocab, experts = devices
    sources: dict[str, NDArray[np.int32]] = {}
    if len(q_heads) > 1:
        q, kv = config.num_heads, config.num_kv_heads
        none = q + 2 * kv
        k = np.where(kv_heads < kv, q + kv_heads, none)
        v = np.where(kv_heads < kv, q + kv + kv_heads, none)
        qkv = np.concatenate([np.where(q_heads < q, q_heads, none), k, v], axis=1)
        sources["qkv"] = sources["qkv_bias"] = _elements(qkv, config.head_dim)
        sources["o"] = _elements(q_heads, config.head_dim)
    if mlp > 1:
        inner = config.intermediate_size
        down = _even(inner, mlp)
        up = np.where(down < inner, inner + down, 2 * inner)
        gate = np.where(down < inner, down, 2 * inner)
        sources["gate_up"] = sources["gate_up_bias"] = np.concatenate([gate, up], axis=1).reshape(-1)
        sources["down"] = down.reshape(-1)
    if vocab > 1:
        sources["embed"] = sources["lm_head"] = _even(config.vocab_size, vocab).reshape(-1)
    if experts > 1 and config.experts is not None:
        held = _even(config.experts.count, experts).reshape(-1)
        sources["experts_gate_up"] = sources["experts_down"] = held
    shapes = config.top_shapes() | config.layer_shapes()
    return {
        name: source
        for name, source in sources.items()
        # A single row of zeros at the end is a change, too.
        if name in shapes and not np.array_equal(source, np.arange(shapes[name][_split_axis(name)]))
    }


def _expert_share(experts: ExpertsConfig | None, devices: int) -> ExpertsConfig | None:
    return None if experts is None else dataclasses.replace(experts, count=-(-experts.count // devices))


def _elements(heads: NDArray[np.int32], head_dim: int) -> NDArray[np.int32]:
    """The rows of these heads, in order; those of a head past the last one lie past the last row."""
    return (heads.reshape(-1, 1) * head_dim + np.arange(head_dim, dtype=np.int32)).reshape(-1)


def _even(size: int, devices: int) -> NDArray[np.int32]:
    """i32 `[devices, n]`: consecutive shares of `range(size)`, the last ones filled up with `size`."""
    share = -(-size // devices)
    return np.minimum(np.arange(devices * share, dtype=np.int32), size).reshape(devices, share)


def _split_axis(name: str) -> int:
    return next(i for i, logical in enumerate(_AXES[name]) if logical is not None)


def _by_name(params: Params, change: Any) -> Params:
    """The tree that `change(name, leaf)` makes of every parameter; layers may be stacked, a tuple, or left out."""

    def each(leaves: dict[str, Any]) -> dict[str, Any]:
        return {name: change(name, leaf) for name, leaf in leaves.items()}

    changed = each({name: leaf for name, leaf in params.items() if name != "layers"})
    if "layers" in params:
        layers = params["layers"]
        changed["layers"] = tuple(map(each, layers)) if isinstance(layers, tuple) else each(layers)
    return changed
