"""Tiny random checkpoints of every model family, as Hugging Face directories; only NumPy and safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
_QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}

TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama3": _LLAMA
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
    "llama-linear": _LLAMA
    | {
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
    },
    "llama-bias": _LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "mistral-window": _MISTRAL | {"sliding_window": 48, "head_dim": 32},
    "qwen2": _QWEN2 | {"tie_word_embeddings": True, "rope_theta": 1_000_000.0},
    "qwen2-window": _QWEN2 | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen2-yarn": _QWEN2
    | {
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    },
    "qwen3": _QWEN3
    | {
        "head_dim": 32,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "mixtral": _MIXTRAL
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None},
    "qwen3-moe": _QWEN3_MOE
    | {
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": False,
        "head_dim": 32,
    },
}
"""What each model's `config.json` adds to, or changes of, the common base."""


def tiny_config(name: str) -> dict[str, Any]:
    """The `config.json` of a tiny model. The context of each is at least 8,193 tokens."""
    return _BASE | TINY_MODELS[name]


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights by Hugging Face name, float32; scaled so that attention is uneven and logits differ clearly."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    family = config["model_type"]

    def matrix(rows: int, columns: int, scale: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, mean: float) -> NDArray[np.float32]:
        return (mean + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 4.0),
        "model.norm.weight": vector(hidden, 1),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, 2.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        tensors[prefix + "input_layernorm.weight"] = vector(hidden, 1)
        tensors[prefix + "post_attention_layernorm.weight"] = vector(hidden, 1)
        tensors[attention + "q_proj.weight"] = matrix(q, hidden, 1.5)
        tensors[attention + "k_proj.weight"] = matrix(kv, hidden, 1.5)
        tensors[attention + "v_proj.weight"] = matrix(kv, hidden)
        tensors[attention + "o_proj.weight"] = matrix(hidden, q)
        if family == "mixtral":
            experts = prefix + "block_sparse_moe."
            tensors |= _expert_tensors(
                experts, ("w1", "w3", "w2"), config["num_local_experts"], inner, matrix, hidden
            )
        elif family == "qwen3_moe" and layer not in config["mlp_only_layers"]:
            names = ("gate_proj", "up_proj", "down_proj")
            size = config["moe_intermediate_size"]
            tensors |= _expert_tensors(mlp, names, config["num_experts"], size, matrix, hidden)
        else:
            tensors[mlp + "gate_proj.weight"] = matrix(inner, hidden)
            tensors[mlp + "up_proj.weight"] = matrix(inner, hidden)
            tensors[mlp + "down_proj.weight"] = matrix(hidden, inner)
        if family == "qwen2" or config.get("attention_bias"):
            for part, size in (("q", q), ("k", kv), ("v", kv)):
                tensors[f"{attention}{part}_proj.bias"] = vector(size, 0)
        if family != "qwen2" and config.get("attention_bias"):
            tensors[attention + "o_proj.bias"] = vector(hidden, 0)
        if config.get("mlp_bias"):
            for part, size in (("gate", inner), ("up", inner), ("down", hidden)):
                tensors[f"{mlp}{part}_proj.bias"] = vector(size, 0)
        if family in ("qwen3", "qwen3_moe"):
            tensors[attention + "q_norm.weight"] = vector(head_dim, 1.5)
            tensors[attention + "k_norm.weight"] = vector(head_dim, 1.5)
    return tensors


def _expert_tensors(
    prefix: str,
    names: tuple[str, str, str],
    count: int,
    inner: int,
    matrix: Callable[..., NDArray[np.float32]],
    hidden: int,
) -> dict[str, NDArray[np.float32]]:
    """A router whose choice is clear, and its experts; names: of gate, up and down."""
    tensors = {f"{prefix}gate.weight": matrix(count, hidden, 3.0)}
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    for expert in range(count):
        for name, shape in zip(names, shapes, strict=True):
            tensors[f"{prefix}experts.{expert}.{name}.weight"] = matrix(*shape)
    return tensors


def write_tiny_checkpoint(directory: str | Path, family: str, seed: int = 0) -> None:
    """Writes `config.json` and `model.safetensors` (float32) of one of `TINY_MODELS` into an existing directory."""
    directory = Path(directory)
    config = tiny_config(family)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tiny_tensors(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
