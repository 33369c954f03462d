"""Converted checkpoints: what goes in comes out, in both forms, types and placements."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from helpers.tiny_gguf import write_tiny_gguf
from helpers.tiny_models import write_tiny_checkpoint
from tierax.models.errors import ModelError
from tierax.models.source import resolve_model
from tierax.models.weights.loader import load_params
from tierax.models.weights.orbax import convert


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("origin")
    write_tiny_checkpoint(directory, "qwen2-window")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (directory / name).write_text(name)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    return directory


@pytest.fixture(scope="module")
def converted(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("out") / "converted"
    convert(resolve_model(origin), destination, dtype="f32")
    return destination


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_round_trip(origin: Path, converted: Path, dtype: str, stacked: bool) -> None:
    before, after = resolve_model(origin), resolve_model(converted)
    assert (before.kind, after.kind) == ("hf", "orbax")
    assert after.config == before.config
    assert after.eos_token_ids == before.eos_token_ids == {1, 106}
    assert after.bos_token_id == before.bos_token_id == 0
    expected = load_params(before, before.config, dtype=dtype, stacked=stacked)
    restored = load_params(after, after.config, dtype=dtype, stacked=stacked)
    assert jax.tree.structure(expected) == jax.tree.structure(restored)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(restored), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_in_some_layers(tmp_path: Path, stacked: bool) -> None:
    origin, destination = tmp_path / "origin", tmp_path / "converted"
    origin.mkdir()
    write_tiny_checkpoint(origin, "qwen3-moe")
    before = resolve_model(origin)
    assert 0 < len(before.config.dense_layers) < before.config.num_layers, "not a mixed model"
    convert(before, destination, dtype="f32")
    after = resolve_model(destination)
    assert after.config == before.config
    expected = load_params(before, before.config, stacked=stacked)
    restored = load_params(after, after.config, stacked=stacked)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


@pytest.mark.parametrize("stacked", [True, False])
def test_restores_sharded(converted: Path, stacked: bool) -> None:
    source = resolve_model(converted)
    mesh = jax.make_mesh((1,), ("model",))
    plain = load_params(source, source.config, stacked=stacked)
    shardings = jax.tree.map(
        lambda leaf: NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "model")), plain
    )
    placed = load_params(source, source.config, stacked=stacked, shardings=shardings)
    for leaf, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding
    jax.tree.map(np.testing.assert_array_equal, placed, plain)


def test_tokenizer_files_come_along(converted: Path) -> None:
    assert (converted / "tokenizer.json").read_text() == "tokenizer.json"
    assert (converted / "chat_template.jinja").exists()
    assert not (converted / "model.safetensors").exists()


def test_a_gguf_source_gets_its_tokenizer_from_the_caller(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", "llama3", "Q8_0")
    source = resolve_model(tmp_path / "model.gguf")
    convert(source, tmp_path / "out", dtype="bf16", write_tokenizer=lambda path: (path / "t").touch() or None)
    assert (tmp_path / "out" / "t").exists()
    restored = resolve_model(tmp_path / "out")
    assert restored.config == source.config
    expected = load_params(source, source.config, dtype="bf16", stacked=True)
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(restored, restored.config, dtype="bf16", stacked=True),
        expected,
    )


def test_nothing_half_done_is_left_behind(origin: Path, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        convert(resolve_model(origin), tmp_path / "out", dtype="f32", write_tokenizer=fail)
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused(origin: Path, converted: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exists already"):
        convert(resolve_model(origin), converted, dtype="f32")
    with pytest.raises(ModelError, match="converted checkpoint already"):
        convert(resolve_model(converted), tmp_path / "again", dtype="f32")
    with pytest.raises(ModelError, match="unknown weight type"):
        convert(resolve_model(origin), tmp_path / "again", dtype="q4")


def test_damage_is_an_error(converted: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(converted, tmp_path / "copy")
    record = json.loads((copy / "tierax.json").read_text())
    other = record | {"config": record["config"] | {"vocab_size": 255, "qkv_bias": False}}
    (copy / "tierax.json").write_text(json.dumps(other))
    source = resolve_model(copy)
    with pytest.raises(ModelError) as caught:
        load_params(source, source.config, stacked=True)
    assert "embed has shape [256, 64], not [255, 64]" in str(caught.value)
    assert "unexpected layers.qkv_bias" in str(caught.value)
    for damaged, message in (
        ({"format": 2}, "format 2 is not supported"),
        ({"format": 1}, "not a complete record"),
    ):
        (copy / "tierax.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelError, match=message):
            resolve_model(copy)


# Orbax leaves the reads beside a failed one to finish after its event loop has closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_incomplete_copy_is_an_error(converted: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(converted, tmp_path / "copy")
    source = resolve_model(copy)
    for path in (copy / "params").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="Orbax checkpoint cannot be read"):
        load_params(source, source.config, stacked=True)
    shutil.rmtree(copy / "params")
    for call in (source.weights_digest, lambda: load_params(source, source.config, stacked=True)):
        with pytest.raises(ModelError, match="no Orbax checkpoint"):
            call()
