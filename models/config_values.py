"""Reading a model's config: values that are as they should be, or a `ModelError` that says which is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, RopeConfig
from .errors import ModelError


def checked(config: ModelConfig) -> ModelConfig:
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


def positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the model's config lacks {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"the model's config has {key} = {value!r}: a positive whole number is expected")
    return value


def number(
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


def scaled_context(rope: RopeConfig, max_position: int) -> int:
    """Longest usable context. Linear and yarn stretch the context that the model was trained with;
    the others state the final length."""
    if rope.kind in ("linear", "yarn"):
        return int(rope.original_max_position * rope.factor)
    return max_position
