"""What a backend offers to a step, and what it is chosen by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from .batch import RaggedBatch
from .linear import Weight

Attend = Callable[..., jax.Array]
"""`attend(q_thd, pool, layer, batch, *, window, soft_cap, scale) -> out_thd`.

q_thd: `[T, heads, head_dim]` (f32 or bf16); pool: see `pages`; layer: index into the pool's layers;
batch: `RaggedBatch`; window: sliding window in tokens, 0 = full; soft_cap: tanh cap on scores, 0 = none;
scale: of the scores, None = head_dim ** -0.5. Returns `[T, heads, head_dim]` in q's dtype; rows of padding
tokens are undefined but finite. The KV of the batch's own tokens must be in the pool before the call.
"""

WriteKv = Callable[..., jax.Array]
"""`write_kv(pool, k_tkd, v_tkd, slots_t, layer) -> pool`, see `pages.write_kv`."""

Linear = Callable[[jax.Array, Weight], jax.Array]
"""`linear(x_ti, weight_oi) -> x_to`, the product with the transposed weight, see `linear.linear`."""

GroupedLinear = Callable[[jax.Array, Weight, jax.Array, "jax.Array | int"], jax.Array]
"""`grouped_linear(x_mi, weight_goi, sizes_e, first) -> x_mo`, in x's dtype: the first `sizes[0]` rows by `weight[first].T`,
the next `sizes[1]` rows by `weight[first + 1].T`, and so on: so the experts of all layers may lie in one array, of which no
layer has to be cut out. Rows past the last group are undefined."""


class LayerShape(NamedTuple):
    """Of a model's dense layers, what their parameters do not tell."""

    heads: int
    head_dim: int
    eps: float
    """Of the norms."""
    windows: tuple[int, ...]
    """Of each layer, in tokens; 0 = full attention."""


class Layers(Protocol):
    """Runs all of a model's layers at once: what `transformer.Layer` computes, one after the other."""

    def serves(self, rows: int, layers: Sequence[dict[str, Any]]) -> bool:
        """Whether it takes steps of so many rows with these parameters, `ModelConfig.layer_shapes` of each layer."""
        ...

    def __call__(
        self,
        x_td: jax.Array,
        pool: jax.Array,
        layers: Sequence[dict[str, Any]],
        shape: LayerShape,
        rotary: tuple[jax.Array, jax.Array],
        slots_t: jax.Array,
        batch: RaggedBatch,
    ) -> tuple[jax.Array, jax.Array]:
        """x: f32 `[T, D]`; rotary: cos and sin f32 `[T, head_dim / 2]`; slots: i32 `[T]`. Gives x behind the last layer
        (rows of padding are undefined but finite), and the pool with the KV of all."""
        ...


class Kernels(NamedTuple):
    """The kernels that one step is built with."""

    name: str
    """Of the backend, as `--attention-backend` spells it."""
    attend: Attend
    write_kv: WriteKv
    linear: Linear
    grouped_linear: GroupedLinear
    layers: Layers | None = None
    """Dense layers in one call, where the backend has that."""
    detail: str = ""
    """What else a user may want to know of them, in a word or two: the instruction set."""

    @property
    def summary(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


class Target(NamedTuple):
    """The device that a step is compiled for: stated, as it need not be one that is here."""

    platform: str
    """cpu, tpu or gpu."""
    generation: str = ""
    """TPU: v5e, v6e or tpu7x; GPU: compute capability, as in 9.0; CPU: nothing."""


class AttentionShape(NamedTuple):
    """Of one device's share of a model: what decides whether a kernel can serve it."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    """Of queries: f32 or bf16."""
    kv_dtype: str
    """Of the pool: f32, bf16 or fp8."""
