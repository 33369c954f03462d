"""`ModelConfig` from a Hugging Face `config.json` or from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig, RopeConfig
from .errors import ModelError
from .rope import rope_frequencies


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


_FAMILIES = {
    "llama": _Family(max_position=2048, bias_keys=True),
    "mistral": _Family(max_position=131_072, num_kv_heads=8),
    "qwen2": _Family(max_position=32_768, num_kv_heads=32, qkv_bias=True),
    "qwen3": _Family(max_position=32_768, num_kv_heads=32, head_dim=128, bias_keys=True, qk_norm=True),
}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ORIGINAL = "original_max_position_embeddings"


# --- Hugging Face ----------------------------------------------------------------------------------------------


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

    num_heads = _positive(raw, "num_attention_heads")
    hidden_size = _positive(raw, "hidden_size")
    num_layers = _positive(raw, "num_hidden_layers")
    max_position = _positive(raw, "max_position_embeddings", family.max_position)
    rope = _hf_rope(raw, max_position)
    attention_bias = family.bias_keys and bool(raw.get("attention_bias", False))
    return _checked(
        ModelConfig(
            family=name,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_positive(raw, "num_key_value_heads", family.num_kv_heads or num_heads),
            head_dim=_positive(raw, "head_dim", family.head_dim or hidden_size // num_heads),
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=_scaled_context(rope, max_position),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=name == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sliding_windows=_hf_windows(name, raw, num_layers),
        )
    )


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
    theta = _number(scaling, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"unsupported partial_rotary_factor {partial}: only whole heads are rotated")

    holder = raw if raw.get(_ORIGINAL) else scaling
    original = _positive(holder, _ORIGINAL, max_position)
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
                low_freq_factor=_number(scaling, "low_freq_factor", where=key),
                high_freq_factor=_number(scaling, "high_freq_factor", where=key),
            )
        case "yarn":
            factor = max_position / original if scaling.get("factor") is None else _factor(scaling, key)
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_max_position=original,
                beta_fast=_number(scaling, "beta_fast", 32.0),
                beta_slow=_number(scaling, "beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(scaling, factor),
                truncate=bool(scaling.get("truncate", True)),
            )
    raise ModelError(f"unsupported rope type {kind!r} in {key}; supported: default, linear, llama3, yarn")


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float | None:
    """Given outright, or as the ratio of two multipliers of the default; None leaves the default."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not mscale or not mscale_all or factor <= 1:
        return None
    log = 0.1 * math.log(factor)
    return (log * mscale + 1.0) / (log * mscale_all + 1.0)


def _scaled_context(rope: RopeConfig, max_position: int) -> int:
    """Longest usable context. Linear and yarn stretch the context that the model was trained with;
    the others state the final length."""
    if rope.kind in ("linear", "yarn"):
        return int(rope.original_max_position * rope.factor)
    return max_position


def _hf_windows(family: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if family == "llama":
        return ()
    if raw.get("sliding_window", 4096) is None:
        return ()
    window = _positive(raw, "sliding_window", 4096)
    if family == "mistral":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return ()
    first = _number(raw, "max_window_layers", 28)
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


# --- GGUF ------------------------------------------------------------------------------------------------------

_GGUF_FAMILIES = ("llama", "qwen2", "qwen3")


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    rope_divisors: NDArray[np.float32] | None = None,
) -> ModelConfig:
    """Reads the metadata of a GGUF file.

    `tensors` are the shapes (`[out, in]`) by name: whether there is an output head, biases, and the size of the
    vocabulary are told by them alone. `rope_divisors` is the tensor `rope_freqs.weight` (float32
    `[head_dim // 2]`), in which llama3 scaling is stored. Raises `ModelError` as `config_from_hf` does.
    """
    family = metadata.get("general.architecture")
    if family not in _GGUF_FAMILIES:
        raise ModelError(f"unsupported GGUF architecture {family!r}; supported: {', '.join(_GGUF_FAMILIES)}")
    prefix = f"{family}."
    raw = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if raw.get("expert_count"):
        raise ModelError(f"unsupported mixture of experts ({raw['expert_count']} experts) in a GGUF file")
    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file has no tensor token_embd.weight: it is not a whole model")

    num_heads = _positive(raw, "attention.head_count")
    hidden_size = _positive(raw, "embedding_length")
    head_dim = _positive(raw, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if raw.get(key, head_dim) != head_dim:
            raise ModelError(
                f"unsupported {family}.{key} = {raw[key]}: it must equal the head size, {head_dim}"
            )
    rope = _gguf_rope(raw, head_dim, rope_divisors)
    num_layers = _positive(raw, "block_count")
    window = raw.get("attention.sliding_window", 0) if family == "llama" else 0
    return _checked(
        ModelConfig(
            family=family,
            vocab_size=tensors["token_embd.weight"][0],
            hidden_size=hidden_size,
            intermediate_size=_positive(raw, "feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_positive(raw, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=_number(raw, "attention.layer_norm_rms_epsilon"),
            rope=rope,
            max_position_embeddings=_scaled_context(rope, _positive(raw, "context_length")),
            tie_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            sliding_windows=(window,) * num_layers if window else (),
        )
    )


def _gguf_rope(raw: Mapping[str, Any], head_dim: int, divisors: NDArray[np.float32] | None) -> RopeConfig:
    theta = _number(raw, "rope.freq_base", 10_000.0)
    kind = raw.get("rope.scaling.type", "none")
    factor = _number(raw, "rope.scaling.factor", _number(raw, "rope.scale_linear", 1.0))
    original = _positive(raw, "rope.scaling.original_context_length", _positive(raw, "context_length"))
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
            extra = _number(raw, "rope.scaling.attn_factor", 1.0)
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_max_position=original,
                beta_fast=_number(raw, "rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=_number(raw, "rope.scaling.yarn_beta_slow", 1.0),
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


# --- both ------------------------------------------------------------------------------------------------------


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{config.num_heads} attention heads do not divide into {config.num_kv_heads} KV heads"
        )
    rope = config.rope
    if rope.theta <= 1 or (rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor):
        raise ModelError(f"impossible rope parameters: {rope}")
    if config.head_dim % 2:
        raise ModelError(f"head_dim {config.head_dim} is odd: rotary embedding needs pairs")
    return config


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the model's config lacks {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"the model's config has {key} = {value!r}: a positive whole number is expected")
    return value


def _number(
    raw: Mapping[str, Any], key: str, default: float | None = None, where: str = "the model's config"
) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{where} lacks {key}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"{where} has {key} = {value!r}: a number is expected")
    return float(value)


def _factor(scaling: Mapping[str, Any], key: str) -> float:
    factor = _number(scaling, "factor", where=key)
    if factor < 1.0:
        raise ModelError(f"{key} has factor = {factor}: at least 1 is expected")
    return factor
