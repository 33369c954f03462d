"""Where a model's files lie, for peers that load them by themselves."""

from __future__ import annotations

from pathlib import Path

from ...models.source import resolve_model


def model_file(path: str) -> Path:
    """The directory or GGUF file that a model's path stands for, `demo` included. Raises `ModelError`."""
    return resolve_model(path).path.absolute()
