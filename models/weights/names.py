"""The one table of weight names: ours, and how Hugging Face and GGUF files spell them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..config import ModelConfig

Format = Literal["hf", "gguf"]
_Names = tuple[str, ...]


class Part(NamedTuple):
    """A stored tensor that becomes a part of a parameter."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int | slice, ...]
    """Its place: the parameter's array, indexed by this."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of our parameters and the stored tensors that it is joined from."""

    name: str
    layer: int | None
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


# ours: (Hugging Face, GGUF); several stored names are joined along the first axis, in this order.
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
    "router": (("mlp.gate.weight",), ("ffn_gate_inp.weight",)),
    # Hugging Face files have a tensor per expert, GGUF files one of all; gate and up are joined for each expert.
    "experts_gate_up": (
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    ),
    "experts_down": (("mlp.experts.{}.down_proj.weight",), ("ffn_down_exps.weight",)),
}

# Where Mixtral's Hugging Face files differ.
_MIXTRAL: dict[str, _Names] = {
    "router": ("block_sparse_moe.gate.weight",),
    "experts_gate_up": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    "experts_down": ("block_sparse_moe.experts.{}.w2.weight",),
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
    shapes = config.layer_shapes()
    holders = {name: frozenset(config.layers_with(name)) for name in shapes}
    for layer in range(config.num_layers):
        prefix = _LAYER_PREFIX[fmt].format(layer)
        for name, shape in shapes.items():
            if layer in holders[name]:
                known = _MIXTRAL if config.family == "mixtral" and fmt == "hf" else {}
                stored = tuple(prefix + part for part in known.get(name, _LAYER[name][column]))
                yield Parameter(name, layer, shape, _parts(config, name, shape, stored))


def is_matrix(name: str, ndim: int) -> bool:
    """Whether a parameter of this name and rank (layers not counted) is a matrix that may be quantised. A router's choice
    turns on small differences, and it is small itself."""
    return ndim > 1 and name != "router"


def is_ignored(stored_name: str, config: ModelConfig, fmt: Format) -> bool:
    """Whether a stored tensor may be there although no parameter is made from it."""
    if config.tie_embeddings and stored_name in _TOP["lm_head"][0 if fmt == "hf" else 1]:
        return True
    return _IGNORED[fmt].fullmatch(stored_name) is not None


def _parts(config: ModelConfig, name: str, shape: tuple[int, ...], stored: _Names) -> tuple[Part, ...]:
    if name.startswith("experts_"):
        return _expert_parts(shape, stored)
    match name:
        case "qkv" | "qkv_bias":
            kv = config.num_kv_heads * config.head_dim
            rows = (config.num_heads * config.head_dim, kv, kv)
        case "gate_up" | "gate_up_bias":
            rows = (config.intermediate_size, config.intermediate_size)
        case _:
            rows = (shape[0],)
    ends = list(itertools.accumulate(rows))
    return tuple(
        Part(part, (count, *shape[1:]), (slice(end - count, end),))
        for part, count, end in zip(stored, rows, ends, strict=True)
    )


def _expert_parts(shape: tuple[int, ...], stored: _Names) -> tuple[Part, ...]:
    """Of a parameter `[experts, out, in]`: each stored name gives an equal share of `out`."""
    experts, rows, columns = shape
    share = rows // len(stored)
    shares = [slice(index * share, (index + 1) * share) for index in range(len(stored))]
    if "{}" not in stored[0]:
        every = slice(None)
        return tuple(
            Part(name, (experts, share, columns), (every, part))
            for name, part in zip(stored, shares, strict=True)
        )
    return tuple(
        Part(name.format(expert), (share, columns), (expert, part))
        for expert in range(experts)
        for name, part in zip(stored, shares, strict=True)
    )
