"""From files to parameters: every one exactly once, joined in the right order, owning its memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from helpers.plain_forward import plain_logprobs
from helpers.tiny_gguf import write_tiny_gguf
from helpers.tiny_models import TINY_MODELS, tiny_config, tiny_tensors, write_tiny_checkpoint
from tierax.models.errors import ModelError
from tierax.models.quantized import TYPES, is_quantized
from tierax.models.quantized import dequantize as dequantize_rows
from tierax.models.sharding import Shares
from tierax.models.source import resolve_model
from tierax.models.weights.loader import Params, load_params
from tierax.models.weights.orbax import convert
from tierax.pallas_kernels.linear import GROUP, dequantize

GOLDEN = Path(__file__).parents[1] / "golden"


def load(path: Path, dtype: str = "f32", stacked: bool = True) -> Params:
    source = resolve_model(path)
    return load_params(source, source.config, dtype=dtype, stacked=stacked)


def write(
    directory: Path, family: str, drop: str = "", add: dict[str, np.ndarray] | None = None, **changes
) -> None:
    """A tiny checkpoint with a changed config, without some tensors or with more."""
    config = tiny_config(family) | changes
    tensors = {name: values for name, values in tiny_tensors(config).items() if name != drop}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors | (add or {}), directory / "model.safetensors")


@pytest.mark.parametrize("family", TINY_MODELS)
@pytest.mark.parametrize("last", [1000, pytest.param(8192, marks=pytest.mark.slow)])
def test_loaded_weights_give_the_reference_values(family: str, last: int, tmp_path: Path) -> None:
    """Through a plain forward pass, at all golden positions up to `last`."""
    write_tiny_checkpoint(tmp_path, family)
    with np.load(GOLDEN / "tiny.npz") as golden:
        positions = [position for position in golden["positions"].tolist() if position <= last]
        ids, expected = golden["ids"][: positions[-1] + 1], golden[family][: len(positions)]
    ours = plain_logprobs(load(tmp_path), resolve_model(tmp_path).config, ids, positions)
    np.testing.assert_allclose(ours, expected, atol=2e-4)


def test_the_demo_model_gives_the_reference_values() -> None:
    """The q and k rows of its GGUF file are interleaved: read as they are, all this would be gibberish."""
    source = resolve_model("demo")
    params = load_params(source, source.config, stacked=True)
    prompts = json.loads((GOLDEN / "demo.json").read_text())
    with np.load(GOLDEN / "demo.npz") as golden:
        tokens, expected = golden["tokens"], golden["logprobs"]
    for index in (0, 6):
        ids = prompts[index]["ids"] + tokens[index, :15].tolist()
        positions = range(len(prompts[index]["ids"]) - 1, len(ids))
        logprobs = plain_logprobs(params, source.config, ids, positions)
        np.testing.assert_array_equal(logprobs.argmax(-1), tokens[index, :16])
        np.testing.assert_allclose(logprobs.max(-1), expected[index, :16], atol=1e-3)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_both_forms_hold_exactly_the_named_shapes(family: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, family)
    config = resolve_model(tmp_path).config
    stacked, layered = load(tmp_path), load(tmp_path, stacked=False)
    shapes = {name: value.shape for name, value in stacked.items() if name != "layers"}
    assert shapes == config.top_shapes()
    assert {name: value.shape[1:] for name, value in stacked["layers"].items()} == config.layer_shapes()
    assert isinstance(layered["layers"], tuple)
    assert len(layered["layers"]) == config.num_layers
    for index, layer in enumerate(layered["layers"]):
        assert set(layer) == {name for name in config.layer_shapes() if index in config.layers_with(name)}
        for name, value in layer.items():
            row = config.layers_with(name).index(index)
            np.testing.assert_array_equal(value, stacked["layers"][name][row])
    assert sum(leaf.size for leaf in jax.tree.leaves(stacked)) == config.num_parameters()


def test_fused_parts_keep_their_order(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen2")
    tensors = tiny_tensors(tiny_config("qwen2"))
    layer = load(tmp_path, stacked=False)["layers"][1]
    prefix = "model.layers.1."
    for kind, name in (("weight", "qkv"), ("bias", "qkv_bias")):
        parts = [tensors[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        np.testing.assert_array_equal(layer[name], np.concatenate(parts))
    parts = [tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(layer["gate_up"], np.concatenate(parts))


@pytest.mark.parametrize(
    "family", ["llama3", "llama-bias", "mistral-window", "qwen2", "qwen3", "mixtral", "qwen3-moe"]
)
def test_gguf_and_safetensors_give_the_same_parameters(family: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, family)
    write_tiny_gguf(tmp_path / "model.gguf", family)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "model.gguf"), load(tmp_path))


def test_a_quantized_gguf_is_close(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama3")
    write_tiny_gguf(tmp_path / "model.gguf", "llama3", "Q8_0")
    exact, close = load(tmp_path), load(tmp_path / "model.gguf")
    assert not np.array_equal(exact["embed"], close["embed"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), exact, close)


def test_bf16_is_rounded_from_the_file(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama3")
    exact, rounded = load(tmp_path), load(tmp_path, "bf16")
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
        assert b.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(a).astype(ml_dtypes.bfloat16), b)
    source = resolve_model(tmp_path)
    with pytest.raises(ModelError, match="unknown weight type 'int3'"):
        load_params(source, source.config, dtype="int3", stacked=True)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_int8_matrices_are_made_of_the_f32_ones(family: str, stacked: bool, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, family)
    source = resolve_model(tmp_path)
    exact = load(tmp_path, stacked=stacked)
    found = load_params(source, source.config, quantization="int8", stacked=stacked)
    converted = tmp_path / "converted"
    convert(source, converted, dtype="f32")
    again = resolve_model(converted)
    restored = load_params(again, again.config, quantization="int8", stacked=stacked)
    jax.tree.map(np.testing.assert_array_equal, restored, found)

    def compare(exact: Params, found: Params, vector_ndim: int) -> None:
        assert set(exact) == set(found)
        for name, leaf in exact.items():
            if leaf.ndim == vector_ndim:
                np.testing.assert_array_equal(found[name], leaf)
            else:
                assert found[name].codes.dtype == np.int8
                assert found[name].shape == leaf.shape
                off = np.abs(dequantize(found[name]) - leaf)
                # Half a step of the group's scale, and rounding.
                most = np.repeat(np.asarray(found[name].scales), GROUP, -1)[..., : leaf.shape[-1]] * 0.5001
                assert (off <= most).all()

    own, layers = exact.pop("layers"), found.pop("layers")
    compare(exact, found, 1)
    if stacked:
        compare(own, layers, 2)
    else:
        for one, other in zip(own, layers, strict=True):
            compare(one, other, 1)


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama3")
    source = resolve_model(tmp_path)
    with pytest.raises(ModelError, match="unknown quantization 'int2'; supported: none, int8"):
        load_params(source, source.config, quantization="int2", stacked=True)
    with pytest.raises(ModelError, match="cannot have shardings of their own"):
        load_params(source, source.config, quantization="int8", stacked=True, shardings={})


@pytest.mark.parametrize("stored", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_stored_types_are_converted(stored: type, tmp_path: Path) -> None:
    write(tmp_path, "llama3")
    tensors = tiny_tensors(tiny_config("llama3"))
    save_file(
        {name: values.astype(stored) for name, values in tensors.items()}, tmp_path / "model.safetensors"
    )
    embed = load(tmp_path)["embed"]
    assert embed.dtype == np.float32
    np.testing.assert_array_equal(
        embed, tensors["model.embed_tokens.weight"].astype(stored).astype(np.float32)
    )


def test_parameters_do_not_hang_on_the_file(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", "qwen2")
    params = load(tmp_path / "model.gguf", stacked=False)
    before = jax.tree.map(np.array, params)
    with (tmp_path / "model.gguf").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(bytes(size // 2))
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_tied_embeddings_with_and_without_a_stored_head(tmp_path: Path) -> None:
    """A-f2: a stored head is ignored when tied, used when not, and missed by name."""
    head = np.random.default_rng(5).standard_normal((256, 64)).astype(np.float32)
    ids, positions = list(range(12)), [0, 11]

    def logprobs() -> np.ndarray:
        return plain_logprobs(load(tmp_path), resolve_model(tmp_path).config, ids, positions)

    write(tmp_path, "llama3", drop="lm_head.weight", tie_word_embeddings=True)
    tied = logprobs()
    write(tmp_path, "llama3", add={"lm_head.weight": head}, tie_word_embeddings=True)
    assert "lm_head" not in load(tmp_path)
    np.testing.assert_array_equal(logprobs(), tied)
    write(tmp_path, "llama3", add={"lm_head.weight": head}, tie_word_embeddings=False)
    np.testing.assert_array_equal(load(tmp_path)["lm_head"], head)
    assert np.abs(logprobs() - tied).max() > 0.5
    write(tmp_path, "llama3", drop="lm_head.weight", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing lm_head\.weight \[256, 64\]"):
        load(tmp_path)


def test_all_mismatches_are_reported_together(tmp_path: Path) -> None:
    wrong = np.zeros((3, 3), np.float32)
    write(
        tmp_path,
        "llama3",
        drop="model.layers.0.mlp.up_proj.weight",
        add={
            "model.layers.1.self_attn.k_proj.weight": wrong,
            "model.layers.2.input_layernorm.weight": wrong,
            "model.layers.0.self_attn.q_proj.bias": wrong,
            "model.layers.0.self_attn.rotary_emb.inv_freq": wrong,
        },
    )
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "(4 problems)" in message
    assert "missing model.layers.0.mlp.up_proj.weight [96, 64]" in message
    assert "model.layers.1.self_attn.k_proj.weight has shape [3, 3], not [32, 64]" in message
    assert "unexpected model.layers.2.input_layernorm.weight" in message
    assert "unexpected model.layers.0.self_attn.q_proj.bias" in message


def test_shardings_are_obeyed(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen2")
    source = resolve_model(tmp_path)
    sharding = jax.sharding.NamedSharding(
        jax.make_mesh((1,), ("model",)), jax.sharding.PartitionSpec("model")
    )
    for stacked in (True, False):
        plain = load_params(source, source.config, stacked=stacked)
        shardings = jax.tree.map(lambda _: sharding, plain)
        placed = load_params(source, source.config, stacked=stacked, shardings=shardings)
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(placed))
        jax.tree.map(np.testing.assert_array_equal, placed, plain)


@pytest.mark.parametrize("family", ["llama3", "qwen3-moe"])
@pytest.mark.parametrize("kind", TYPES)
def test_matrices_of_few_bits_are_made_of_the_f32_ones(kind: str, family: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, family)
    source = resolve_model(tmp_path)
    exact = load_params(source, source.config, stacked=True)
    for stacked in (True, False):
        params = load_params(source, source.config, quantization=kind, stacked=stacked)
        layers = params["layers"] if stacked else params["layers"][2 if family == "qwen3-moe" else 1]
        assert not any(
            is_quantized(layers[name]) for name in layers if name.endswith("norm") or name == "router"
        )
        for name in ("qkv", "experts_down") if family == "qwen3-moe" else ("qkv", "down"):
            expected = np.asarray(exact["layers"][name]) if stacked else np.asarray(exact["layers"][name])[-1]
            weight = layers[name]
            assert weight.qvalue.dtype == TYPES[kind]
            step = np.abs(expected).max() * {"int8-rows": 1 / 127, "fp8": 1 / 16, "int4": 1 / 7}[kind]
            np.testing.assert_allclose(dequantize_rows(weight, jnp.float32), expected, atol=step)
    assert is_quantized(params["embed"])


def test_what_cannot_be_split_is_refused_and_qwix_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_checkpoint(tmp_path, "llama3")
    source = resolve_model(tmp_path)
    shares = Shares(source.config, Mesh(np.array(jax.devices()[:1]), ("tp",)))
    for kind in ("int8", "int4"):
        with pytest.raises(ModelError, match=f"{kind} weights cannot be split over devices"):
            load_params(source, source.config, quantization=kind, stacked=True, shares=shares)
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ModelError, match=r"fp8 weights need qwix: pip install 'tierax\[quant\]'"):
        load_params(source, source.config, quantization="fp8", stacked=True)
