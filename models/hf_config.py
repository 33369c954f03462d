"""`ModelConfig` from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import ExpertsConfig, ModelConfig, RopeConfig
from .config_values import checked, number, positive, scaled_context
from .errors import ModelError


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family means where its `config.json` is silent."""

    max_position: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    bias_keys: bool = False
    """Obeys `attention_bias` (q, k, v and o)."""
    qk_norm: bool = False
    experts: bool = False


_FAMILIES = {
    "llama": _Family(max_position=2048, bias_keys=True),
    "mistral": _Family(max_position=131_072, num_kv_heads=8),
    "qwen2": _Family(max_position=32_768, num_kv_heads=32, qkv_bias=True),
    "qwen3": _Family(max_position=32_768, num_kv_heads=32, head_dim=128, bias_keys=True, qk_norm=True),
    "mixtral": _Family(max_position=131_072, num_kv_heads=8, experts=True),
    "qwen3_moe": _Family(max_position=32_768, num_kv_heads=4, bias_keys=True, qk_norm=True, experts=True),
}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_ORIGINAL = "original_max_position_embeddings"


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a parsed `config.json`.

    Raises `ModelError` for an architecture, activation, quantization or rope scaling that is not supported, and for
    missing or impossible values.
    """
    name = _hf_family(raw)
    family = _FAMILIES[name]
    if (act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"unsupported hidden_act {act!r}; supported: silu")
    if quantization := raw.get("quantization_config"):
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        )
        raise ModelError(
            f"unsupported quantization_config ({method}): use an unquantized checkpoint or a GGUF file"
        )

    num_heads = positive(raw, "num_attention_heads")
    hidden_size = positive(raw, "hidden_size")
    num_layers = positive(raw, "num_hidden_layers")
    max_position = positive(raw, "max_position_embeddings", family.max_position)
    rope = _hf_rope(raw, max_position)
    attention_bias = family.bias_keys and bool(raw.get("attention_bias", False))
    return checked(
        ModelConfig(
            family=name,
            vocab_size=positive(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=positive(raw, "num_key_value_heads", family.num_kv_heads or num_heads),
            head_dim=positive(raw, "head_dim", family.head_dim or hidden_size // num_heads),
            rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=scaled_context(rope, max_position),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=name == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sliding_windows=_hf_windows(name, raw, num_layers),
            experts=_hf_experts(name, raw, num_layers) if family.experts else None,
        )
    )


def _hf_experts(family: str, raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """All that is wrong is told in one message."""
    problems: list[str] = []

    def whole(key: str, default: int | None = None) -> int:
        try:
            return positive(raw, key, default)
        except ModelError as error:
            problems.append(str(error).removeprefix("the model's config "))
            return 1

    dense: tuple[int, ...] = ()
    if family == "mixtral":
        experts, per_token, inner = (
            whole("num_local_experts" if "num_local_experts" in raw else "num_experts", 8),
            whole("num_experts_per_tok", 2),
            whole("intermediate_size"),
        )
        normalized = True
    else:
        experts, per_token, inner = (
            whole("num_experts" if "num_experts" in raw else "num_local_experts", 128),
            whole("num_experts_per_tok", 8),
            whole("moe_intermediate_size", 768),
        )
        normalized = bool(raw.get("norm_topk_prob", False))
        only = raw.get("mlp_only_layers") or []
        if not isinstance(only, list) or any(layer not in range(num_layers) for layer in only):
            problems.append(f"mlp_only_layers = {only!r}: numbers of the {num_layers} layers are expected")
            only = []
        sparse_step = whole("decoder_sparse_step", 1)
        dense = tuple(layer for layer in range(num_layers) if layer in only or (layer + 1) % sparse_step)
        if len(dense) == num_layers:
            problems.append(
                f"decoder_sparse_step = {sparse_step} and mlp_only_layers = {only!r} leave no layer with experts"
            )
    if not problems and per_token > experts:
        problems.append(f"num_experts_per_tok = {per_token} of {experts} experts")
    if problems:
        raise ModelError("the model's config has wrong values for its experts: " + "; ".join(problems))
    return ExpertsConfig(experts, per_token, inner, normalized, dense)


def _hf_family(raw: Mapping[str, Any]) -> str:
    if architectures := raw.get("architectures"):
        named = (
            [str(name) for name in architectures] if isinstance(architectures, list) else [str(architectures)]
        )
        for architecture in named:
            if architecture in _ARCHITECTURES:
                return _ARCHITECTURES[architecture]
        raise ModelError(
            f"unsupported architecture {', '.join(named)}; supported: {', '.join(_ARCHITECTURES)}"
        )
    model_type = raw.get("model_type")
    if model_type not in tuple(_FAMILIES):
        raise ModelError(
            f"unsupported model_type {model_type!r} in config.json; supported: {', '.join(_FAMILIES)}"
        )
    return str(model_type)


def _hf_rope(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    """`rope_parameters` (one dict with everything) or the older `rope_theta` + `rope_scaling`."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelError(f"unsupported {key}: one flat dict is expected, not {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = number(scaling, "rope_theta", number(raw, "rope_theta", 10_000.0))
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"unsupported partial_rotary_factor {partial}: only whole heads are rotated")

    holder = raw if raw.get(_ORIGINAL) else scaling
    original = positive(holder, _ORIGINAL, max_position)
    match kind:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(
                theta=theta, kind="linear", factor=_factor(scaling, key), original_max_position=original
            )
        case "llama3":
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=_factor(scaling, key),
                original_max_position=original,
                low_freq_factor=number(scaling, "low_freq_factor", where=key),
                high_freq_factor=number(scaling, "high_freq_factor", where=key),
            )
        case "yarn":
            factor = max_position / original if scaling.get("factor") is None else _factor(scaling, key)
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_max_position=original,
                beta_fast=number(scaling, "beta_fast", 32.0),
                beta_slow=number(scaling, "beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(scaling, factor),
                truncate=bool(scaling.get("truncate", True)),
            )
    raise ModelError(f"unsupported rope type {kind!r} in {key}; supported: default, linear, llama3, yarn")


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float | None:
    """Given outright, or as the ratio of two multipliers of the default; None leaves the default."""
    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor")
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not mscale or not mscale_all or factor <= 1:
        return None
    log = 0.1 * math.log(factor)
    return (log * mscale + 1.0) / (log * mscale_all + 1.0)


def _hf_windows(family: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    # Mixtral's code reads the key, and its releases leave it null.
    if family == "llama" or raw.get("sliding_window", None if family == "mixtral" else 4096) is None:
        return ()
    window = positive(raw, "sliding_window", 4096)
    if family in ("mistral", "mixtral"):
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return ()
    if family == "qwen3_moe":
        return (window,) * num_layers
    first = number(raw, "max_window_layers", 28)
    layer_types = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(layer_types) != num_layers or not set(layer_types) <= {"sliding_attention", "full_attention"}:
        raise ModelError(
            f"layer_types must name sliding_attention or full_attention for each of {num_layers} layers, "
            f"not {layer_types!r}"
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
    return windows if any(windows) else ()


def _factor(scaling: Mapping[str, Any], key: str) -> float:
    factor = number(scaling, "factor", where=key)
    if factor < 1.0:
        raise ModelError(f"{key} has factor = {factor}: at least 1 is expected")
    return factor
