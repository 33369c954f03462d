"""Rotary position embedding: frequencies for half-rotation layout (first half of a head pairs with the second)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .config import RopeConfig

Frequencies = NDArray[np.float32]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Frequencies, float]:
    """Angle per position of each rotated pair, and the scale of cos and sin.

    Returns `(inv_freq, attention_scale)`: `inv_freq` is float32 `[head_dim // 2]` in radians per position; the
    embedding of position p is `cos(p * inv_freq) * attention_scale` and `sin(p * inv_freq) * attention_scale`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # In float64 and rounded: in float32 NumPy's `power` depends on the processor, and machines that share KV must agree.
    powers = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    inv_freq = np.float32(1) / powers
    match rope.kind:
        case "default":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / np.float32(rope.factor), 1.0
        case "llama3":
            return _llama3(inv_freq, rope), 1.0
        case "yarn":
            return _yarn(inv_freq, rope, head_dim), _yarn_attention_scale(rope)


def _llama3(inv_freq: Frequencies, rope: RopeConfig) -> Frequencies:
    """Short waves stay, waves longer than the trained context are slowed by `factor`, a linear blend between."""
    turns = rope.original_max_position * inv_freq / np.float32(2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(inv_freq, rope.factor, np.clip(kept, 0.0, 1.0))


def _yarn(inv_freq: Frequencies, rope: RopeConfig, head_dim: int) -> Frequencies:
    """As llama3, but the blend is linear in the dimension, between those that turn beta_fast and beta_slow times."""

    def dimension_turning(turns: float) -> float:
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
    return _blend(inv_freq, rope.factor, 1 - np.clip(ramp, 0.0, 1.0))


def _blend(inv_freq: Frequencies, factor: float, kept: NDArray[np.floating]) -> Frequencies:
    """`kept` = 1: the frequency as trained; 0: divided by `factor`."""
    return (inv_freq * kept + inv_freq / np.float32(factor) * (1 - kept)).astype(np.float32)


def _yarn_attention_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
