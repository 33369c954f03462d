"""`ModelConfig` from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import ExpertsConfig, ModelConfig, RopeConfig
from .config_values import checked, number, positive, scaled_context
from .errors import ModelError
from .rope import rope_frequencies

_GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""By the name of the architecture; one that is called llama and has experts is Mixtral."""


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    rope_divisors: NDArray[np.float32] | None = None,
) -> ModelConfig:
    """Reads the metadata of a GGUF file.

    `tensors` are the shapes (`[out, in]`) by name: whether there is an output head, biases, and the size of the
    vocabulary are told by them alone. `rope_divisors` is the tensor `rope_freqs.weight` (float32
    `[head_dim // 2]`), in which llama3 scaling is stored. Raises `ModelError` as `hf_config.config_from_hf` does.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _GGUF_FAMILIES:
        raise ModelError(
            f"unsupported GGUF architecture {architecture!r}; supported: {', '.join(_GGUF_FAMILIES)}"
        )
    family = _GGUF_FAMILIES[architecture]
    prefix = f"{architecture}."
    raw = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    experts = _gguf_experts(architecture, raw, tensors)
    if experts is not None and architecture == "llama":
        family = "mixtral"
    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file has no tensor token_embd.weight: it is not a whole model")

    num_heads = positive(raw, "attention.head_count")
    hidden_size = positive(raw, "embedding_length")
    head_dim = positive(raw, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if raw.get(key, head_dim) != head_dim:
            raise ModelError(
                f"unsupported {architecture}.{key} = {raw[key]}: it must equal the head size, {head_dim}"
            )
    rope = _gguf_rope(raw, head_dim, rope_divisors)
    num_layers = positive(raw, "block_count")
    window = raw.get("attention.sliding_window", 0) if architecture == "llama" else 0
    # A file of experts alone need not state the size of a plain MLP.
    inner = None if experts is None or experts.dense_layers else experts.intermediate_size
    return checked(
        ModelConfig(
            family=family,
            vocab_size=tensors["token_embd.weight"][0],
            hidden_size=hidden_size,
            intermediate_size=positive(raw, "feed_forward_length", inner),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=positive(raw, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=number(raw, "attention.layer_norm_rms_epsilon"),
            rope=rope,
            max_position_embeddings=scaled_context(rope, positive(raw, "context_length")),
            tie_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            sliding_windows=(window,) * num_layers if window else (),
            experts=experts,
        )
    )


def _gguf_experts(
    architecture: str, raw: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
) -> ExpertsConfig | None:
    """Which layers have experts is told by their tensors."""
    if not raw.get("expert_count"):
        return None
    if architecture not in ("llama", "qwen3moe"):
        raise ModelError(f"unsupported mixture of experts in a GGUF file of architecture {architecture}")
    count, per_token = positive(raw, "expert_count"), positive(raw, "expert_used_count")
    layers = range(positive(raw, "block_count"))
    dense = tuple(layer for layer in layers if f"blk.{layer}.ffn_gate_exps.weight" not in tensors)
    if len(dense) == len(layers):
        raise ModelError(
            "the GGUF file has experts in its metadata and no tensor blk.0.ffn_gate_exps.weight: convert it anew with a"
            " llama.cpp of April 2024 or later"
        )
    first = next(layer for layer in layers if layer not in dense)
    stored = tensors[f"blk.{first}.ffn_gate_exps.weight"]
    inner = positive(raw, "expert_feed_forward_length", stored[-2])
    if per_token > count:
        raise ModelError(f"the model's config has expert_used_count = {per_token} of {count} experts")
    return ExpertsConfig(count, per_token, inner, normalized=True, dense_layers=dense)


def _gguf_rope(raw: Mapping[str, Any], head_dim: int, divisors: NDArray[np.float32] | None) -> RopeConfig:
    theta = number(raw, "rope.freq_base", 10_000.0)
    kind = raw.get("rope.scaling.type", "none")
    factor = number(raw, "rope.scaling.factor", number(raw, "rope.scale_linear", 1.0))
    original = positive(raw, "rope.scaling.original_context_length", positive(raw, "context_length"))
    if divisors is not None:
        if kind != "none":
            raise ModelError(f"unsupported rope scaling type {kind!r} together with rope_freqs.weight")
        return _llama3_from_divisors(theta, head_dim, divisors)
    match kind:
        case "none" if factor == 1.0 or "rope.scale_linear" not in raw:
            return RopeConfig(theta=theta)
        case "none" | "linear":
            return RopeConfig(theta=theta, kind="linear", factor=factor, original_max_position=original)
        case "yarn":
            extra = number(raw, "rope.scaling.attn_factor", 1.0)
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_max_position=original,
                beta_fast=number(raw, "rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=number(raw, "rope.scaling.yarn_beta_slow", 1.0),
                attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
            )
    raise ModelError(
        f"unsupported rope scaling type {kind!r} in the GGUF file; supported: none, linear, yarn"
    )


def _llama3_from_divisors(theta: float, head_dim: int, divisors: NDArray[np.float32]) -> RopeConfig:
    """The parameters that all Llama 3.x releases share, accepted only if they reproduce the stored divisors."""
    rope = RopeConfig(theta=theta, kind="llama3", factor=float(divisors.max()), original_max_position=8192)
    expected = rope_frequencies(RopeConfig(theta=theta), head_dim)[0] / rope_frequencies(rope, head_dim)[0]
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(
            "unsupported rope_freqs.weight: the divisors are not those of Llama 3's rope scaling"
        )
    return rope
