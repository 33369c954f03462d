"""The models that are compiled: their shapes, as their published configurations state them. No weights."""

from __future__ import annotations

import dataclasses

from tierax.models.config import ExpertsConfig, ModelConfig, RopeConfig

MODELS = {
    "Qwen3-8B": ModelConfig(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        max_position_embeddings=40_960,
        tie_embeddings=False,
        qk_norm=True,
    ),
    "Llama-3.1-8B": ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0, kind="llama3", factor=8.0, original_max_position=8192),
        max_position_embeddings=131_072,
        tie_embeddings=False,
    ),
    "SmolLM2-135M": ModelConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        max_position_embeddings=8192,
        tie_embeddings=True,
    ),
}

LARGE_MODELS = {
    "Llama-3.1-70B": dataclasses.replace(
        MODELS["Llama-3.1-8B"],
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
    ),
    "Qwen3-30B-A3B": dataclasses.replace(
        MODELS["Qwen3-8B"],
        family="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_kv_heads=4,
        experts=ExpertsConfig(count=128, per_token=8, intermediate_size=768),
    ),
    "Mixtral-8x7B": dataclasses.replace(
        MODELS["Llama-3.1-8B"],
        family="mixtral",
        vocab_size=32_000,
        rope=RopeConfig(theta=1_000_000.0),
        max_position_embeddings=32_768,
        experts=ExpertsConfig(count=8, per_token=2, intermediate_size=14_336),
    ),
}
"""What needs several devices."""
