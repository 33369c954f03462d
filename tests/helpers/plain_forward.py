"""The whole forward pass of a model in plain NumPy: slow, obvious, and independent of the engine's code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierax.models.config import ModelConfig, RopeConfig

Array = NDArray[np.float32]


def plain_logprobs(
    params: Mapping[str, Any], config: ModelConfig, ids: Sequence[int], positions: Sequence[int]
) -> Array:
    """Log-probs float32 `[len(positions), V]` of the token after each position; `params` are stacked."""
    final = plain_hidden(params, config, ids)[np.asarray(positions)]
    logits = (final @ np.asarray(params.get("lm_head", params["embed"]), np.float32).T).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def plain_hidden(params: Mapping[str, Any], config: ModelConfig, ids: Sequence[int]) -> Array:
    """Normalised hidden states float32 `[T, D]` of the last layer; `params` are stacked."""
    params = {name: value for name, value in params.items() if name != "layers"} | {
        "layers": {name: np.asarray(value, np.float32) for name, value in params["layers"].items()}
    }
    rows = {
        name: {layer: row for row, layer in enumerate(config.layers_with(name))} for name in params["layers"]
    }
    hidden = np.asarray(params["embed"], np.float32)[np.asarray(ids)]
    cos, sin = plain_rotation(config.rope, config.head_dim, np.arange(len(ids)))
    for index in range(config.num_layers):
        layer = {
            name: value[rows[name][index]] for name, value in params["layers"].items() if index in rows[name]
        }
        hidden = hidden + _attention(
            layer, config, _norm(hidden, layer["attn_norm"], config), cos, sin, index
        )
        mlp = partial(_mixture, config) if "router" in layer else _mlp
        hidden = hidden + mlp(layer, _norm(hidden, layer["mlp_norm"], config))
    return _norm(hidden, np.asarray(params["final_norm"]), config)


def plain_rotation(rope: RopeConfig, head_dim: int, positions: NDArray[np.integer]) -> tuple[Array, Array]:
    """cos and sin float32 `[T, head_dim // 2]`; one pair at a time, straight from the published formulas."""
    angles = np.empty((len(positions), head_dim // 2), np.float32)
    scale = 1.0
    for pair in range(head_dim // 2):
        frequency = np.float32(1.0) / np.float32(rope.theta ** np.float32(2 * pair / head_dim))
        angles[:, pair] = positions.astype(np.float32) * np.float32(
            _scaled(rope, float(frequency), pair, head_dim)
        )
    if rope.kind == "yarn":
        scale = (
            rope.attention_factor if rope.attention_factor is not None else 0.1 * math.log(rope.factor) + 1
        )
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def _scaled(rope: RopeConfig, frequency: float, pair: int, head_dim: int) -> float:
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / frequency
        if wavelength < rope.original_max_position / rope.high_freq_factor:
            return frequency
        if wavelength > rope.original_max_position / rope.low_freq_factor:
            return frequency / rope.factor
        smooth = rope.original_max_position / wavelength - rope.low_freq_factor
        smooth /= rope.high_freq_factor - rope.low_freq_factor
        return (1 - smooth) * frequency / rope.factor + smooth * frequency
    if rope.kind == "yarn":
        edges = [
            head_dim
            * math.log(rope.original_max_position / (2 * math.pi * beta))
            / (2 * math.log(rope.theta))
            for beta in (rope.beta_fast, rope.beta_slow)
        ]
        if rope.truncate:
            edges = [math.floor(edges[0]), math.ceil(edges[1])]
        low, high = max(edges[0], 0), min(edges[1], head_dim - 1)
        slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
        return slowed * frequency / rope.factor + (1 - slowed) * frequency
    return frequency


def _norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(config.rms_norm_eps)) * weight


def _attention(
    layer: Mapping[str, Array], config: ModelConfig, x: Array, cos: Array, sin: Array, index: int
) -> Array:
    tokens, heads, kv_heads, size = len(x), config.num_heads, config.num_kv_heads, config.head_dim
    qkv = x @ layer["qkv"].T + layer.get("qkv_bias", np.float32(0))
    q, k, v = np.split(qkv.reshape(tokens, heads + 2 * kv_heads, size), [heads, heads + kv_heads], axis=1)
    if config.qk_norm:
        q, k = _norm(q, layer["q_norm"], config), _norm(k, layer["k_norm"], config)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    out = np.empty((tokens, heads, size), np.float32)
    window = config.window(index) or tokens
    for head in range(heads):
        kv = head // (heads // kv_heads)
        for start in range(0, tokens, 512):
            rows = np.arange(start, min(start + 512, tokens))[:, None]
            columns = np.arange(rows[-1, 0] + 1)[None]
            scores = q[rows[:, 0], head] @ k[: columns.size, kv].T / np.float32(math.sqrt(size))
            scores = np.where((columns <= rows) & (columns > rows - window), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[rows[:, 0], head] = weights @ v[: columns.size, kv] / weights.sum(-1, keepdims=True)
    return out.reshape(tokens, -1) @ layer["o"].T + layer.get("o_bias", np.float32(0))


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(np.float32)


def _mlp(layer: Mapping[str, Array], x: Array) -> Array:
    gate, up = np.split(x @ layer["gate_up"].T + layer.get("gate_up_bias", np.float32(0)), 2, axis=-1)
    inner = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    return inner @ layer["down"].T + layer.get("down_bias", np.float32(0))


def _mixture(config: ModelConfig, layer: Mapping[str, Array], x: Array) -> Array:
    """One token after the other, each by its own experts."""
    experts = config.experts
    assert experts is not None
    logits = (x @ layer["router"].T).astype(np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.zeros_like(x)
    for token, row in enumerate(weights):
        chosen = np.argsort(-row, kind="stable")[: experts.per_token]
        total = row[chosen].sum() if experts.normalized else 1.0
        for expert in chosen:
            own = {"gate_up": layer["experts_gate_up"][expert], "down": layer["experts_down"][expert]}
            out[token] += np.float32(row[expert] / total) * _mlp(own, x[token])
    return out
