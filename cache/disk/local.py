"""What a page store does with a directory beside tensorstore: making it, writing files, removing what killed writers leave."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .names import ROOT

LOCK_SUFFIX = ".__lock"
"""tensorstore writes KEY into KEY.__lock and renames it; it never lists such names, and so we call what we write."""


class StoreError(Exception):
    """The place cannot serve as a page store; the message says why, for the user."""


def local_path(url: str) -> Path | None:
    """The directory that `url` means; None if it is not one. Raises StoreError for what cannot be a store."""
    if not url:
        raise StoreError("give a directory or a URL")
    if url.startswith("{"):
        return None
    scheme, separator, _ = url.partition("://")
    if not separator:
        return Path(url).expanduser().absolute()
    if scheme in ("http", "https"):
        raise StoreError(
            "a web server can be neither listed nor written; use a directory, file://, s3:// or gs://"
        )
    if scheme != "file":
        return None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise StoreError(f"{url} names a host; a local directory is file:///path")
    return Path(unquote(parts.path))


def open_directory(path: Path, *, create: bool) -> bool:
    """Makes sure of a directory, readable by nobody else if it is new; returns whether it can be written.

    With `create` a writable one gets a folder for our names, which marks it as a store. Raises OSError: not a
    directory, cannot be made, cannot be read.
    """
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
    if not os.access(path, os.R_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "not readable", str(path))
    writable = os.access(path, os.W_OK)
    if create and writable:
        (path / ROOT).mkdir(mode=0o700, exist_ok=True)
    return writable


def is_store(path: Path) -> bool:
    """Whether a page store was ever opened for writing there."""
    return (path / ROOT).is_dir()


def write_file(path: str, record: bytes) -> None:
    """Makes a file, in place of any that is there, which shows when it is whole. Raises OSError, and then leaves nothing.

    tensorstore copies a value twice before it writes it; this takes half of the processor time.
    """
    # A name of its own: another process may be writing the same page.
    unfinished = f"{path}.{secrets.token_hex(4)}{LOCK_SUFFIX}"
    descriptor = _create(unfinished)
    try:
        # Before there is anything in it: a store that is being opened sweeps what nobody holds.
        _lock(descriptor)
        rest = memoryview(record)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    finally:
        os.close(descriptor)


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o666)


def sweep_locks(path: Path) -> int:
    """Removes the half-written files that killed writers left in the store at `path`; returns how many.

    One that a living writer holds, here or in another process, is locked and stays.
    """
    swept = 0
    for folder, _, files in os.walk(path / ROOT):
        for name in files:
            if name.endswith(LOCK_SUFFIX) and _remove_unlocked(os.path.join(folder, name)):
                swept += 1
    return swept


def _remove_unlocked(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        _lock(descriptor)
        os.unlink(path)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """The kind of lock that tensorstore's writers take; the kernel drops it when they die. Raises OSError if another has it."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole_file)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_empty_folders(root: Path) -> None:
    """Removes folders below `root`, and `root`, that hold nothing."""
    for folder, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
