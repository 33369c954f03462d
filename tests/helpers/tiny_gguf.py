"""Tiny GGUF models, written with the `gguf` package from the same random weights as `tiny_models`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from .tiny_models import tiny_config, tiny_tensors

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate.": "ffn_gate_inp.",
    "mlp.gate.": "ffn_gate_inp.",
}
_EXPERT = re.compile(r"(.*)(?:block_sparse_moe|mlp)\.experts\.\d+\.(\w+)\.weight")
_EXPERT_NAMES = {
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "gate_proj": "gate",
    "down_proj": "down",
    "up_proj": "up",
}

_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}


def write_tiny_gguf(path: Path, family: str, quant: str = "F32", seed: int = 0, **extra: Any) -> None:
    """Writes one of `TINY_MODELS` without rope scaling; its matrices as `quant`, its vectors as F32.

    `extra` metadata: whole numbers and lists of strings, dots spelled `__`.
    """
    config = tiny_config(family)
    kind = str(config["model_type"])
    arch = _ARCHITECTURES.get(kind, kind)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in extra.items():
        key = key.replace("__", ".")
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)

    if (count := config.get("num_local_experts") or config.get("num_experts")) is not None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])

    for name, values in _experts_joined(tiny_tensors(config, seed)).items():
        if arch == "llama" and ".q_proj" in name:
            values = interleave(values, heads)
        if arch == "llama" and ".k_proj" in name:
            values = interleave(values, kv_heads)
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        kind = GGMLQuantizationType[quant if values.ndim > 1 and "ffn_gate_inp" not in name else "F32"]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _experts_joined(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """One tensor of all experts for each of theirs."""
    joined: dict[str, list[NDArray[np.float32]]] = {}
    for name, values in tensors.items():
        if match := _EXPERT.fullmatch(name):
            name = f"{match[1]}ffn_{_EXPERT_NAMES[match[2]]}_exps.weight"
        joined.setdefault(name, []).append(values)
    return {name: np.stack(values) if "_exps" in name else values[0] for name, values in joined.items()}


def interleave(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The order of q and k rows in Llama's GGUF files: pair i of a head at rows 2i and 2i + 1."""
    size = len(values) // heads
    rows = np.empty_like(values)
    for head in range(heads):
        for pair in range(size // 2):
            rows[head * size + 2 * pair] = values[head * size + pair]
            rows[head * size + 2 * pair + 1] = values[head * size + size // 2 + pair]
    return rows
