"""The shape of a model: what the loaders fill in and everything else reads. Pure: no jax, no arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]

_MLP = ("gate_up", "gate_up_bias", "down", "down_bias")
_EXPERTS = ("router", "experts_gate_up", "experts_down")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its long-context scaling (see `models.rope`)."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    """Context the model was trained with before scaling; llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: scale of cos and sin; None means 0.1 * ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the correction range to whole dimensions, as the reference code does by default."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of layers' MLPs: a router sends each token to a few of many small MLPs."""

    count: int
    per_token: int
    """Experts that a token goes to: those that the router's softmax gives most."""
    intermediate_size: int
    """Inner size of one expert."""
    normalized: bool = True
    """The weights of a token's experts are scaled to a sum of 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that keep a plain MLP, in order."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of the Llama lineage (Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner size of a plain MLP."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    """Window of each layer in tokens, 0 = full attention; empty means full attention everywhere."""
    experts: ExpertsConfig | None = None

    def window(self, layer: int) -> int:
        """Sliding window of one layer in tokens; 0 = full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a plain MLP, in order; the others have experts."""
        return tuple(range(self.num_layers)) if self.experts is None else self.experts.dense_layers

    def layers_with(self, name: str) -> tuple[int, ...]:
        """The layers that have the parameter of this name, in order."""
        if name in _MLP:
            return self.dense_layers
        if name in _EXPERTS:
            dense = set(self.dense_layers)
            return tuple(layer for layer in range(self.num_layers) if layer not in dense)
        return tuple(range(self.num_layers))

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters of a layer; which layers have which, `layers_with` tells.

        Matrices are `[out, in]`, those of experts `[experts, out, in]`; q, k, v and gate, up are fused along `out`.
        """
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        q, qkv = self.num_heads * h, (self.num_heads + 2 * self.num_kv_heads) * h
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (d,),
            "qkv": (qkv, d),
            "o": (d, q),
            "mlp_norm": (d,),
        }
        if self.dense_layers:
            shapes |= {"gate_up": (2 * f, d), "down": (d, f)}
        if (e := self.experts) is not None:
            shapes |= {
                "router": (e.count, d),
                "experts_gate_up": (e.count, 2 * e.intermediate_size, d),
                "experts_down": (e.count, d, e.intermediate_size),
            }
        if self.qkv_bias:
            shapes["qkv_bias"] = (qkv,)
        if self.o_bias:
            shapes["o_bias"] = (d,)
        if self.mlp_bias:
            shapes["gate_up_bias"] = (2 * f,)
            shapes["down_bias"] = (d,)
        if self.qk_norm:
            shapes["q_norm"] = (h,)
            shapes["k_norm"] = (h,)
        return shapes

    def top_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters outside the layers. `lm_head` is absent when the embeddings are tied."""
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (self.vocab_size, self.hidden_size),
            "final_norm": (self.hidden_size,),
        }
        if not self.tie_embeddings:
            shapes["lm_head"] = (self.vocab_size, self.hidden_size)
        return shapes

    def num_parameters(self) -> int:
        """Stored parameters; a tied head counts once."""
        layers = self.layer_shapes().items()
        of_layers = sum(len(self.layers_with(name)) * math.prod(shape) for name, shape in layers)
        return sum(map(math.prod, self.top_shapes().values())) + of_layers

    def parameters_per_token(self) -> int:
        """The parameters that one token meets: those of experts count for the few that it goes to."""
        if (e := self.experts) is None:
            return self.num_parameters()
        of_expert = sum(
            math.prod(self.layer_shapes()[name][1:]) for name in ("experts_gate_up", "experts_down")
        )
        idle = (e.count - e.per_token) * of_expert * (self.num_layers - len(e.dense_layers))
        return self.num_parameters() - idle

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of all layers for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
