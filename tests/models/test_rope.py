"""Rotary frequencies against a plain reference, and against values made with transformers, at large positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.plain_forward import plain_rotation
from tierax.models.config import RopeConfig
from tierax.models.hf_config import config_from_hf
from tierax.models.rope import rope_frequencies

POSITIONS = np.array([0, 1000, 8192, 20_000])
GOLDEN = Path(__file__).parents[1] / "golden"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "rope.json").read_text())


def rotation(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    inv_freq, scale = rope_frequencies(rope, head_dim)
    assert inv_freq.dtype == np.float32
    assert inv_freq.shape == (head_dim // 2,)
    angles = POSITIONS.astype(np.float32)[:, None] * inv_freq
    return np.cos(angles) * scale, np.sin(angles) * scale


def case_config(name: str) -> tuple[RopeConfig, int]:
    head_dim = CASES[name]["head_dim"]
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    return config_from_hf(raw | CASES[name]).rope, head_dim


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    with np.load(GOLDEN / "rope.npz") as golden:
        expected, scale = golden[name], float(golden[name + "/scale"])
        cos, sin = golden[name + "/cos"], golden[name + "/sin"]
    rope, head_dim = case_config(name)
    inv_freq, attention_scale = rope_frequencies(rope, head_dim)
    assert attention_scale == pytest.approx(scale, abs=1e-6)
    # One unit in the last place is all that two float32 `pow`s differ by.
    np.testing.assert_allclose(inv_freq, expected, rtol=2.5e-7, atol=0)
    ours = rotation(rope, head_dim)
    same = inv_freq == expected
    np.testing.assert_allclose(ours[0][:, same], cos[:, same], atol=1e-6)
    np.testing.assert_allclose(ours[1][:, same], sin[:, same], atol=1e-6)
    assert same.mean() >= 0.8


@pytest.mark.parametrize("name", CASES)
def test_rotation_equals_the_plain_reference(name: str) -> None:
    rope, head_dim = case_config(name)
    for ours, plain in zip(rotation(rope, head_dim), plain_rotation(rope, head_dim, POSITIONS), strict=True):
        # The angle itself has an ulp of 1e-3 at position 20,000: the two may round apart by one.
        ulp = np.spacing(POSITIONS.astype(np.float32))[:, None] * rope_frequencies(rope, head_dim)[0]
        np.testing.assert_array_less(np.abs(ours - plain), 1e-4 + ulp)


def test_scaling_matters_beyond_position_zero() -> None:
    plain = rotation(RopeConfig(), 64)[0]
    for name in ("linear", "llama3-8b", "yarn"):
        rope, _ = case_config(name)
        scaled = rotation(rope, 64)[0]
        if rope.kind != "yarn":
            np.testing.assert_array_equal(scaled[0], plain[0])
        assert np.abs(scaled[1:] - plain[1:]).max() > 0.5
