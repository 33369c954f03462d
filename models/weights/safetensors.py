"""Reads the weights of a Hugging Face directory: one safetensors file, or exactly the shards of its index."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import ModelError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")


def weight_files(directory: Path) -> list[Path]:
    """The files that make up a checkpoint, in order of name.

    With an index: exactly the files it names, whatever else lies there. Without: `model.safetensors`, or the only
    `*.safetensors` there is. Raises `ModelError` when one is missing or the choice is not clear.
    """
    if (directory / _INDEX).is_file():
        files = [directory / name for name in sorted(set(_read_index(directory).values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ModelError(
                f"{directory}: {_INDEX} names missing files: {', '.join(missing)} (interrupted download?)"
            )
        return files
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1:
        raise ModelError(
            f"{directory}: {len(files)} safetensors files, but neither {_SINGLE} nor {_INDEX} to say which belong "
            "to the model"
        )
    if not files:
        others = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)
        )
        hint = f"; {others[0]} is of a format that is not read, convert it to safetensors" if others else ""
        raise ModelError(f"{directory}: no safetensors file{hint}")
    return files


class SafetensorsWeights:
    """Lazy access to the tensors of a directory; a context manager that closes its files.

    Raises `ModelError` on opening for a missing, truncated or garbled file, for an index that contradicts its
    shards, and for tensors that are not floating point.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {path.name: _open(path) for path in weight_files(directory)}
        self._home = self._find_tensors()
        self._shapes = {name: self._inspect(name) for name in self._home}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for handle in self._files.values():
            handle.__exit__(kind, error, tb)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its stored name."""
        return self._shapes

    def read(self, name: str) -> NDArray[Any]:
        """Values in the stored type: float64, float32, float16 or bfloat16."""
        return self._files[self._home[name]].get_tensor(name)

    def read_range(self, name: str, axis: int, start: int, stop: int) -> NDArray[Any]:
        """Part of a tensor along one axis; the rest is not read."""
        everything = [slice(None)] * len(self._shapes[name])
        everything[axis] = slice(start, stop)
        return self._files[self._home[name]].get_slice(name)[tuple(everything)]

    def _find_tensors(self) -> dict[str, str]:
        """File of each tensor. An index is taken at its word, and must be right."""
        stored = {file: set(handle.keys()) for file, handle in self._files.items()}
        if not (self._directory / _INDEX).is_file():
            return {name: file for file, names in stored.items() for name in sorted(names)}
        home = _read_index(self._directory)
        if absent := sorted(name for name, file in home.items() if name not in stored[file]):
            raise ModelError(
                f"{self._directory}: {_INDEX} places {len(absent)} tensors in files that lack them: "
                + ", ".join(f"{name} ({home[name]})" for name in absent[:8])
            )
        return home

    def _inspect(self, name: str) -> tuple[int, ...]:
        view = self._files[self._home[name]].get_slice(name)
        if view.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{self._directory / self._home[name]}: {name} has type {view.get_dtype()}; supported: "
                f"{', '.join(_DTYPES)} (quantized checkpoints are not)"
            )
        return tuple(view.get_shape())


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file: {error} (interrupted download?)") from error


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / _INDEX
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: not a safetensors index: {error}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: its weight_map is empty")
    if outside := [name for name in weight_map.values() if Path(name).name != name]:
        raise ModelError(f"{path}: file names must be plain, not {outside[0]!r}")
    return weight_map
