"""The shape of a model: what the loaders fill in and everything else reads. Pure: no jax, no arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


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
class ModelConfig:
    """One decoder-only transformer of the Llama lineage (Llama, Mistral, Qwen2, Qwen3)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
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

    def window(self, layer: int) -> int:
        """Sliding window of one layer in tokens; 0 = full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters of one layer. Matrices are `[out, in]`; q, k, v and gate, up are fused along `out`."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        q, qkv = self.num_heads * h, (self.num_heads + 2 * self.num_kv_heads) * h
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (d,),
            "qkv": (qkv, d),
            "o": (d, q),
            "mlp_norm": (d,),
            "gate_up": (2 * f, d),
            "down": (d, f),
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

        def count(shapes: dict[str, tuple[int, ...]]) -> int:
            total = 0
            for shape in shapes.values():
                size = 1
                for dim in shape:
                    size *= dim
                total += size
            return total

        return count(self.top_shapes()) + self.num_layers * count(self.layer_shapes())

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of all layers for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
