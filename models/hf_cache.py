"""Finds models that the Hugging Face tools have downloaded before. Reads only; never the network."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .errors import ModelError

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Whether they can be read is not the question here."""


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where downloads are kept, by the variables that the Hugging Face tools go by."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := environ.get(name):
            return Path(given).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"


def find_cached(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The directory or file in the cache that `name` means: `org/model`, `org/model@revision` or `org/model/file.gguf`.

    None when `name` is not written like one, or is a bare word that is not there. Raises `ModelError` with the command
    to download it when it is absent or not whole.
    """
    repository, file, revision = _parse(name)
    if repository is None:
        return None
    folder = cache_directory(environ) / f"models--{repository.replace('/', '--')}"
    command = _command(repository, file, revision)
    if not folder.is_dir():
        # A bare word may well be a mistyped path: say so, not that something should be downloaded.
        if "/" not in repository:
            return None
        raise ModelError(
            f"{name}: no such file or directory, and not in the Hugging Face cache {folder.parent};"
            f" download it with: {command}"
        )
    snapshot = _snapshot(folder, revision)
    if snapshot is None:
        wanted = f"revision {revision}" if revision else "finished download"
        raise ModelError(f"{repository}: the Hugging Face cache has no {wanted} of it; run: {command}")
    if missing := _missing(snapshot, file):
        raise ModelError(
            f"{repository}: the Hugging Face cache lacks {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more files' if len(missing) > 3 else ''}; run: {command}"
        )
    return snapshot / file if file else snapshot


def _parse(name: str) -> tuple[str | None, str | None, str | None]:
    """Repository, file and revision; no repository when the name is none."""
    name, _, revision = name.partition("@")
    parts = name.split("/")
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    good = _NAME.fullmatch(repository) and ".." not in parts and not (file and not file.endswith(".gguf"))
    # What ends in .gguf with no more than two parts is the path of a file.
    if not good or (not file and name.endswith(".gguf")):
        return None, None, None
    return repository, file or None, revision or None


def _command(repository: str, file: str | None, revision: str | None) -> str:
    return " ".join(
        [
            "hf download",
            repository,
            *([file] if file else []),
            *(["--revision", revision] if revision else []),
        ]
    )


def _snapshot(folder: Path, revision: str | None) -> Path | None:
    """The directory of a revision: a branch or tag that `refs` knows, or a commit or its first digits; without one
    `main`, else the only one that there is."""
    snapshots = folder / "snapshots"
    reference = folder / "refs" / (revision or "main")
    commit = revision
    with suppress(OSError, ValueError):
        commit = reference.read_text(encoding="utf-8").strip()
    found = sorted(path for path in snapshots.glob("*") if path.is_dir()) if snapshots.is_dir() else []
    if commit is not None:
        found = [path for path in found if path.name.startswith(commit)]
    return found[0] if len(found) == 1 else None


def _missing(snapshot: Path, file: str | None) -> list[str]:
    """Files that the model needs and the snapshot lacks. A link whose target was not downloaded counts as lacking."""
    if file is not None:
        return [] if (snapshot / file).is_file() else [file]
    missing = sorted(path.name for path in snapshot.iterdir() if path.is_symlink() and not path.exists())
    if any(snapshot.glob("*.gguf")):
        return missing
    needed = ["config.json"]
    if (snapshot / _INDEX).is_file():
        try:
            weights = json.loads((snapshot / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            needed += sorted({str(part) for part in weights.values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            needed.append(_INDEX)
    elif not any(path.suffix in _WEIGHTS for path in snapshot.iterdir()):
        needed.append("model.safetensors")
    return missing + [part for part in needed if part not in missing and not (snapshot / part).is_file()]
