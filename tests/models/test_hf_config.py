"""config.json and GGUF metadata to ModelConfig: what each family means, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.tiny_models import TINY_MODELS, tiny_config
from tierax.models.config import RopeConfig
from tierax.models.errors import ModelError
from tierax.models.gguf_config import config_from_gguf
from tierax.models.hf_config import config_from_hf
from tierax.models.rope import rope_frequencies

LLAMA = tiny_config("llama3") | {"rope_scaling": None}


def hf(**changes: Any) -> dict[str, Any]:
    return LLAMA | changes


def mistral(**changes: Any) -> dict[str, Any]:
    return hf(architectures=["MistralForCausalLM"], **changes)


def qwen2(**changes: Any) -> dict[str, Any]:
    return hf(architectures=["Qwen2ForCausalLM"], **changes)


def qwen3(**changes: Any) -> dict[str, Any]:
    return hf(architectures=["Qwen3ForCausalLM"], **changes)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_family_is_read(name: str) -> None:
    config = config_from_hf(tiny_config(name))
    assert config.family == tiny_config(name)["model_type"]
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (
        tiny_config(name)["num_hidden_layers"],
        64,
        256,
    )
    assert config.max_position_embeddings == 16_384


def test_head_dim_and_kv_heads_are_given_or_derived() -> None:
    assert config_from_hf(hf()).head_dim == 16
    assert config_from_hf(hf(head_dim=32)).head_dim == 32
    assert config_from_hf(hf(head_dim=None)).head_dim == 16
    assert config_from_hf(qwen3()).head_dim == 128
    without_kv = {key: value for key, value in hf().items() if key != "num_key_value_heads"}
    assert config_from_hf(without_kv).num_kv_heads == 4
    with pytest.raises(ModelError, match="4 attention heads do not divide into 3 KV heads"):
        config_from_hf(hf(num_key_value_heads=3))


def test_biases_and_norms_of_each_family() -> None:
    def flags(raw: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
        config = config_from_hf(raw)
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert flags(hf()) == (False, False, False, False)
    assert flags(hf(attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert flags(mistral(attention_bias=True)) == (False, False, False, False)
    assert flags(qwen2()) == (True, False, False, False)
    assert flags(qwen3()) == (False, False, False, True)
    assert flags(qwen3(attention_bias=True)) == (True, True, False, True)


def test_embeddings_are_untied_unless_said() -> None:
    for raw in (hf(), mistral(), qwen2(), qwen3()):
        silent = {key: value for key, value in raw.items() if key != "tie_word_embeddings"}
        assert not config_from_hf(silent).tie_embeddings
        assert config_from_hf(silent | {"tie_word_embeddings": True}).tie_embeddings


def test_sliding_windows_follow_each_familys_rule() -> None:
    def windows(raw: dict[str, Any]) -> tuple[int, ...]:
        return config_from_hf(raw).sliding_windows

    assert windows(hf(sliding_window=8)) == ()
    assert windows(mistral(sliding_window=8)) == (8, 8)
    assert windows(mistral(sliding_window=None)) == ()
    assert windows(mistral()) == (4096, 4096)
    assert windows(qwen2(sliding_window=8, max_window_layers=0)) == ()
    assert windows(qwen2(sliding_window=8, max_window_layers=1, use_sliding_window=True)) == (0, 8)
    assert windows(qwen3(sliding_window=8, max_window_layers=2, use_sliding_window=True)) == ()
    layer_types = ["sliding_attention", "full_attention"]
    assert windows(qwen3(sliding_window=8, use_sliding_window=True, layer_types=layer_types)) == (8, 0)
    with pytest.raises(ModelError, match="layer_types"):
        windows(qwen3(sliding_window=8, use_sliding_window=True, layer_types=["chunked_attention"] * 2))


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_in_all_spellings(spelling: str, key: str) -> None:
    yarn = {spelling: "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = config_from_hf(hf(**{key: yarn}, rope_theta=5e5, max_position_embeddings=4096))
    assert config.rope == RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_max_position=4096)
    assert config.max_position_embeddings == 16_384


def test_rope_parameters_hold_theta() -> None:
    raw = hf(rope_parameters={"rope_type": "default", "rope_theta": 123.0}, rope_theta=None)
    assert config_from_hf(raw).rope == RopeConfig(theta=123.0)


def test_longest_context_follows_the_scaling() -> None:
    def longest(maximum: int, **scaling: Any) -> int:
        return config_from_hf(
            hf(max_position_embeddings=maximum, rope_scaling=scaling)
        ).max_position_embeddings

    llama3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    assert longest(4096, type="linear", factor=2.5) == 10_240
    assert longest(131_072, rope_type="llama3", factor=8.0, **llama3) == 131_072
    assert longest(32_768, type="yarn", factor=4.0, original_max_position_embeddings=32_768) == 131_072
    assert longest(131_072, type="yarn", factor=4.0, original_max_position_embeddings=32_768) == 131_072


def test_yarn_attention_factor() -> None:
    def factor(**scaling: Any) -> float | None:
        yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
        return config_from_hf(hf(rope_scaling=yarn | scaling)).rope.attention_factor

    assert factor() is None
    assert factor(attention_factor=1.25) == 1.25
    log = 0.1 * np.log(40)
    assert factor(mscale=1.0, mscale_all_dim=0.5) == pytest.approx((log + 1) / (0.5 * log + 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "unsupported architecture GptOssForCausalLM"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"architectures": None, "model_type": "gemma3"}, "unsupported model_type 'gemma3'"),
        ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "unsupported rope type 'dynamic' in rope_scaling",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "unsupported rope type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat dict"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_theta": 0}, "impossible rope parameters"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1.5}},
            "= 1.5: a positive whole",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "4k"}, "sliding_window = '4k'"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf(hf(**changes))


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 16_384,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10_000.0,
    "llama.rope.dimension_count": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
TENSORS: dict[str, tuple[int, ...]] = {"token_embd.weight": (256, 64), "output.weight": (256, 64)}


def test_gguf_metadata_gives_the_same_config_as_config_json() -> None:
    assert config_from_gguf(GGUF, TENSORS) == config_from_hf(hf())
    assert config_from_gguf(GGUF, {"token_embd.weight": (256, 64)}).tie_embeddings


def test_gguf_biases_and_norms_are_told_by_the_tensors() -> None:
    metadata = {key.replace("llama", "qwen3"): value for key, value in GGUF.items()}
    metadata["general.architecture"] = "qwen3"
    tensors = TENSORS | {"blk.0.attn_q_norm.weight": (16,), "blk.0.attn_q.bias": (64,)}
    config = config_from_gguf(metadata, tensors)
    assert (config.family, config.qk_norm, config.qkv_bias, config.o_bias) == ("qwen3", True, True, False)


def test_gguf_rope_scaling() -> None:
    linear = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    expected = RopeConfig(kind="linear", factor=4.0, original_max_position=16_384)
    assert config_from_gguf(linear, TENSORS).rope == expected
    assert config_from_gguf(linear, TENSORS).max_position_embeddings == 65_536
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 4096}
    expected = RopeConfig(kind="yarn", factor=4.0, original_max_position=4096)
    assert config_from_gguf(yarn, TENSORS).rope == expected
    assert config_from_gguf(yarn, TENSORS).max_position_embeddings == 16_384


def test_gguf_llama3_scaling_is_recovered_from_its_divisors() -> None:
    rope = RopeConfig(theta=5e5, kind="llama3", factor=32.0, original_max_position=8192)
    divisors = rope_frequencies(RopeConfig(theta=5e5), 16)[0] / rope_frequencies(rope, 16)[0]
    metadata = GGUF | {"llama.rope.freq_base": 5e5}
    assert config_from_gguf(metadata, TENSORS, divisors).rope == rope
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        config_from_gguf(metadata, TENSORS, divisors + np.arange(8, dtype=np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "unsupported GGUF architecture 'gemma3'"),
        ({"llama.expert_count": 8}, "lacks expert_used_count"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, "no tensor blk.0.ffn_gate_exps.weight"),
        ({"llama.rope.scaling.type": "longrope"}, "unsupported rope scaling type 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8"),
        ({"llama.block_count": None}, "lacks block_count"),
        ({"llama.attention.head_count": [4, 2]}, r"attention.head_count = \[4, 2\]"),
    ],
)
def test_gguf_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_gguf(GGUF | changes, TENSORS)


def mixture(**changes: Any) -> dict[str, Any]:
    return tiny_config("qwen3-moe") | {"num_hidden_layers": 4, "mlp_only_layers": []} | changes


def test_layers_with_experts_follow_step_and_exceptions() -> None:
    def dense(**changes: Any) -> tuple[int, ...]:
        return config_from_hf(mixture(**changes)).dense_layers

    assert dense() == ()
    assert dense(decoder_sparse_step=2) == (0, 2)
    assert dense(decoder_sparse_step=2, mlp_only_layers=[3]) == (0, 2, 3)
    assert dense(mlp_only_layers=[0, 1]) == (0, 1)
    assert config_from_hf(mixture(mlp_only_layers=[0])).layers_with("router") == (1, 2, 3)
    assert config_from_hf(mixture(mlp_only_layers=[0])).layers_with("gate_up") == (0,)
    assert "gate_up" not in config_from_hf(mixture()).layer_shapes()


def test_all_that_is_wrong_with_experts_is_told_at_once() -> None:
    with pytest.raises(ModelError) as error:
        config_from_hf(mixture(num_experts=0, moe_intermediate_size="40", mlp_only_layers=[4]))
    for part in ("num_experts = 0", "moe_intermediate_size = '40'", "mlp_only_layers = [4]"):
        assert part in str(error.value)
    with pytest.raises(ModelError, match="num_experts_per_tok = 9 of 8 experts"):
        config_from_hf(mixture(num_experts_per_tok=9))
    with pytest.raises(ModelError, match="leave no layer with experts"):
        config_from_hf(mixture(decoder_sparse_step=5))


def test_a_token_meets_few_of_the_parameters() -> None:
    config = config_from_hf(mixture())
    expert = 3 * 40 * 64
    assert config.num_parameters() - config.parameters_per_token() == 4 * (8 - 3) * expert
    assert config_from_hf(hf()).parameters_per_token() == config_from_hf(hf()).num_parameters()
