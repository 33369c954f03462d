"""Which files of a Hugging Face directory are read, and what is refused before serving."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.tiny_models import tiny_config, tiny_tensors, write_tiny_checkpoint
from tierax.models.errors import ModelError
from tierax.models.weights.safetensors import SafetensorsWeights, weight_files

NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_shards(directory: Path) -> dict[str, np.ndarray]:
    """`llama3` in two shards with an index."""
    tensors = tiny_tensors(tiny_config("llama3"))
    names = sorted(tensors)
    shards = {NAMES[0]: names[: len(names) // 2], NAMES[1]: names[len(names) // 2 :]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (directory / "config.json").write_text(json.dumps(tiny_config("llama3")))
    return tensors


def test_sharded_values_are_read(tmp_path: Path) -> None:
    tensors = write_shards(tmp_path)
    with SafetensorsWeights(tmp_path) as weights:
        assert weights.shapes() == {name: values.shape for name, values in tensors.items()}
        for name, values in tensors.items():
            np.testing.assert_array_equal(weights.read(name), values)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / NAMES[1]).unlink()
    with pytest.raises(ModelError, match=f"missing files: {NAMES[1]}"):
        SafetensorsWeights(tmp_path)


def test_stray_files_are_ignored(tmp_path: Path) -> None:
    tensors = write_shards(tmp_path)
    zeros = {name: np.zeros_like(values) for name, values in tensors.items()}
    for stray in ("old.safetensors", "model.safetensors", "consolidated.safetensors"):
        save_file(zeros, tmp_path / stray)
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    assert [path.name for path in weight_files(tmp_path)] == list(NAMES)
    with SafetensorsWeights(tmp_path) as weights:
        np.testing.assert_array_equal(weights.read("lm_head.weight"), tensors["lm_head.weight"])


@pytest.mark.parametrize("cut", [4, 100, 5000, -1])
def test_a_truncated_shard_is_refused(tmp_path: Path, cut: int) -> None:
    write_shards(tmp_path)
    shard = tmp_path / NAMES[0]
    shard.write_bytes(shard.read_bytes()[:cut])
    with pytest.raises(ModelError, match=rf"{NAMES[0]}: not a whole safetensors file"):
        SafetensorsWeights(tmp_path)


def test_an_index_must_be_right(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"lm_head.weight": NAMES[1]}}))
    with pytest.raises(ModelError, match=r"places 1 tensors in files that lack them: lm_head\.weight"):
        SafetensorsWeights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="file names must be plain"):
        SafetensorsWeights(tmp_path)
    for damaged in ("{", "[]", "{}", '{"weight_map": {}}'):
        index.write_text(damaged)
        with pytest.raises(ModelError, match=r"index\.json"):
            SafetensorsWeights(tmp_path)


def test_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no safetensors file"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is of a format that is not read"):
        weight_files(tmp_path)
    write_tiny_checkpoint(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors"]
    (tmp_path / "b.safetensors").touch()
    with pytest.raises(ModelError, match=r"2 safetensors files, but neither model\.safetensors nor"):
        weight_files(tmp_path)
    (tmp_path / "b.safetensors").rename(tmp_path / "model.safetensors")
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": np.zeros((2, 2), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight has type I8"):
        SafetensorsWeights(tmp_path)
