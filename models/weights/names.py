"""The one table of weight names: ours, and how Hugging Face and GGUF files spell them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..config import ModelConfig

Format = Literal["hf", "gguf"]
_Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of our parameters and the stored tensors that it is joined from, in order, along its first axis."""

    name: str
    layer: int | None
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """`(stored name, shape)`."""


# ours: (Hugging Face, GGUF); several stored names are joined along the first axis.
_TOP: dict[str, tuple[_Names, _Names]] = {
    "embed": (("model.embed_tokens.weight",), ("token_embd.weight",)),
    "final_norm": (("model.norm.weight",), ("output_norm.weight",)),
    "lm_head": (("lm_head.weight",), ("output.weight",)),
}

# Below `model.layers.{i}.` (Hugging Face) and `blk.{i}.` (GGUF).
_LAYER: dict[str, tuple[_Names, _Names]] = {
    "attn_norm": (("input_layernorm.weight",), ("attn_norm.weight",)),
    "qkv": (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    ),
    "qkv_bias": (
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    ),
    "q_norm": (("self_attn.q_norm.weight",), ("attn_q_norm.weight",)),
    "k_norm": (("self_attn.k_norm.weight",), ("attn_k_norm.weight",)),
    "o": (("self_attn.o_proj.weight",), ("attn_output.weight",)),
    "o_bias": (("self_attn.o_proj.bias",), ("attn_output.bias",)),
    "mlp_norm": (("post_attention_layernorm.weight",), ("ffn_norm.weight",)),
    "gate_up": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), ("ffn_gate.weight", "ffn_up.weight")),
    "gate_up_bias": (("mlp.gate_proj.bias", "mlp.up_proj.bias"), ("ffn_gate.bias", "ffn_up.bias")),
    "down": (("mlp.down_proj.weight",), ("ffn_down.weight",)),
    "down_bias": (("mlp.down_proj.bias",), ("ffn_down.bias",)),
}

_LAYER_PREFIX: dict[Format, str] = {"hf": "model.layers.{}.", "gguf": "blk.{}."}

# Stored tensors that hold no parameter of ours: rotary tables (recomputed), and a head that tied embeddings replace.
_IGNORED: dict[Format, re.Pattern[str]] = {
    "hf": re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
    "gguf": re.compile(r"rope_freqs\.weight"),
}


def parameters(config: ModelConfig, fmt: Format) -> Iterator[Parameter]:
    """Every parameter of the model once, with the stored tensors that make it up."""
    column = 0 if fmt == "hf" else 1
    for name, shape in config.top_shapes().items():
        yield Parameter(name, None, shape, _parts(config, name, shape, _TOP[name][column]))
    for layer in range(config.num_layers):
        prefix = _LAYER_PREFIX[fmt].format(layer)
        for name, shape in config.layer_shapes().items():
            stored = tuple(prefix + part for part in _LAYER[name][column])
            yield Parameter(name, layer, shape, _parts(config, name, shape, stored))


def is_ignored(stored_name: str, config: ModelConfig, fmt: Format) -> bool:
    """Whether a stored tensor may be there although no parameter is made from it."""
    if config.tie_embeddings and stored_name in _TOP["lm_head"][0 if fmt == "hf" else 1]:
        return True
    return _IGNORED[fmt].fullmatch(stored_name) is not None


def _parts(
    config: ModelConfig, name: str, shape: tuple[int, ...], stored: _Names
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    match name:
        case "qkv" | "qkv_bias":
            kv = config.num_kv_heads * config.head_dim
            rows = (config.num_heads * config.head_dim, kv, kv)
        case "gate_up" | "gate_up_bias":
            rows = (config.intermediate_size, config.intermediate_size)
        case _:
            rows = (shape[0],)
    return tuple((part, (count, *shape[1:])) for part, count in zip(stored, rows, strict=True))
