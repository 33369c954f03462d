"""SHA-256 of weight files, remembered by their stat in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ..errors import ModelError

_Known = dict[str, list[object]]


def files_digest(files: Sequence[Path]) -> str:
    """Hex SHA-256 over the contents of `files` in their order; file names do not count.

    Files whose path, size, inode and times are as remembered are not read again. Raises `ModelError` for a file
    that cannot be read.
    """
    store = _store_path()
    known = _load(store)
    try:
        keys = [str(file.resolve()) for file in files]
        stamps = [_stamp(file) for file in files]
        stale = [i for i, key in enumerate(keys) if known.get(key, [])[:-1] != stamps[i]]
        with ThreadPoolExecutor() as pool:
            fresh = list(pool.map(_file_digest, [files[i] for i in stale]))
        # A file that changed while it was read must not be remembered under either stamp.
        stable = [i for i in stale if _stamp(files[i]) == stamps[i]]
    except OSError as error:
        raise ModelError(f"the weights cannot be read: {error}") from error
    found = dict(zip(stale, fresh, strict=True))
    digests = [found[i] if i in found else str(known[key][-1]) for i, key in enumerate(keys)]
    if stable:
        _save(store, known | {keys[i]: [*stamps[i], digests[i]] for i in stable})
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> list[object]:
    """Changes whenever a file is rewritten or replaced, even one of equal size and restored mtime."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _store_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tierax" / "weight-digests.json"


def _load(store: Path) -> _Known:
    """A damaged store is as good as none: digests are computed again."""
    try:
        known = json.loads(store.read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, list)} if isinstance(known, dict) else {}


def _save(store: Path, known: _Known) -> None:
    """Replaces the store in one step; where the cache directory cannot be written, nothing is remembered."""
    temporary = store.with_suffix(f".{os.getpid()}.tmp")
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(known))
        temporary.replace(store)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
