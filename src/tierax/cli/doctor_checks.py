"""What `tierax doctor` looks at beside the device: memory, model files, disks, folders of our own, libraries, the port.

Each check gives what it found, and, where something should be otherwise, what to do.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models.source import ModelSource

MB, GIB = 10**6, 1 << 30
LITTLE_MEMORY = 2 * GIB
"""What a small model, its caches and the step programs need together."""
PROBE_BYTES = 64 << 20
SLOW_DISK = 100 * MB
"""Bytes per second; below it, computing a prompt is often as fast as reading it."""
FREE_FLOOR = GIB
"""Of a file system, left free by the disk cache (the default of --disk-free-space)."""
PORT = 30000


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    title: str
    text: str
    advice: str | None = None
    """What to change; None: nothing."""
    broken: bool = False
    """Nothing can be served, or a setting that was given cannot be used."""


def check_memory(total: int, available: int, needed: int) -> Finding:
    """`needed`: by the weights, and a little KV."""
    text = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if available < needed:
        return Finding(
            "memory",
            f"{text}; the model takes {needed / GIB:.1f} GiB",
            "free memory, take a smaller model, or store its weights in fewer bits (--quantization int8, --dtype bf16)",
            broken=True,
        )
    if available < LITTLE_MEMORY:
        advice = "little memory: give the caches sizes of their own (--device-cache-size 256MiB --host-cache-size 0), or free some"
        return Finding("memory", text, advice)
    return Finding("memory", text)


def check_model(source: ModelSource, itemsize: int) -> Finding:
    """Its files are there; how large it is."""
    config = source.config
    text = (
        f"{source.path}: {config.num_parameters() / 1e6:,.0f} M parameters, {config.kv_bytes_per_token(itemsize) / 1024:.0f} KiB of KV per token,"
        f" up to {config.max_position_embeddings:,} tokens"
    )
    return Finding("model", text)


def check_disk(place: str, kv_bytes_per_token: int, clock: Callable[[], float]) -> Finding:
    """A directory for the disk cache: that it can be written, how much is free, how fast it is."""
    title = "disk cache"
    if "://" in place and not place.startswith("file://"):
        return Finding(title, f"{place}: an object store; whether it answers shows when the server starts")
    path = Path(place.removeprefix("file://")).expanduser()
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir():
        advice = f"{parent} is a file: name a directory with --host-disk-cache-dir"
        return Finding(title, f"{path}: not a directory", advice, broken=True)
    try:
        write_s, read_s = _probe(parent, clock)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            advice = f"let this user write there (chown, or a mount without ro), or name another directory; as it is, {path} could at most be read"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space, or name another directory"
        else:
            advice = "name another directory"
        return Finding(title, f"{path}: {error.strerror or error}", advice, broken=True)
    free = shutil.disk_usage(parent).free
    read_rate = PROBE_BYTES / read_s
    text = (
        f"{path}: {free / GIB:.0f} GiB free; writes {PROBE_BYTES / write_s / MB:,.0f} MB/s, reads {read_rate / MB:,.0f} MB/s, "
        f"so {read_rate / kv_bytes_per_token:,.0f} tokens/s come back from it"
    )
    if free < 2 * FREE_FLOOR:
        return Finding(
            title,
            text,
            f"hardly any room: {FREE_FLOOR / GIB:.0f} GiB stays free in any case (--disk-free-space); free some, or name another",
        )
    if read_rate < SLOW_DISK:
        return Finding(
            title,
            text,
            "a slow disk: put the cache on a local SSD, or let requests wait less for it (--prefetch-policy best_effort)",
        )
    return Finding(title, text)


def check_programs(directory: Path | None) -> Finding:
    """Where compiled programs are kept from start to start."""
    title = "programs kept"
    if directory is None:
        return Finding(title, "nowhere (--compile-cache-dir none): every start compiles")
    parent = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if _writable(parent):
        kept = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        return Finding(
            title, f"{directory}: {kept / MB:,.0f} MB" + ("" if kept else ", the first start compiles")
        )
    return Finding(
        title,
        f"{directory}: cannot be written",
        "every start will compile for about a minute: set XDG_CACHE_HOME or --compile-cache-dir to a directory that this user may write",
    )


def check_accelerator(platform: str, devices: Path = Path("/dev")) -> Finding | None:
    """A GPU or TPU that jax does not see."""
    if platform != "cpu":
        return None
    for pattern, name, extra in (
        ("nvidia[0-9]*", "NVIDIA GPU", "cuda12"),
        ("accel[0-9]*", "TPU", "tpu"),
        ("vfio/[0-9]*", "TPU", "tpu"),
    ):
        if any(devices.glob(pattern)):
            advice = f"pip install 'tierax[{extra}]', and unset JAX_PLATFORMS if it says cpu"
            return Finding("accelerator", f"there seems to be an {name}, which jax does not see", advice)
    return None


def check_libraries() -> Finding:
    """What only some commands need."""
    optional = {"matplotlib": "pictures of lab and bench: pip install 'tierax[lab]'"}
    missing = [f"{name} ({use})" for name, use in optional.items() if find_spec(name) is None]
    return Finding("libraries", f"without {', '.join(missing)}" if missing else "all, the optional ones too")


def check_port(port: int = PORT) -> Finding:
    """Whether a server could listen where it does by default."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            advice = f"something listens there already: stop it, or serve on another port (--port {port + 1})"
            return Finding("port", f"{port}: {error.strerror}", advice)
    return Finding("port", f"{port} is free")


def _writable(directory: Path) -> bool:
    """Tried, since permissions do not tell all: not of a superuser, nor of special file systems."""
    try:
        with tempfile.TemporaryDirectory(dir=directory):
            return True
    except OSError:
        return False


def _probe(directory: Path, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds to write and sync `PROBE_BYTES` there, and to read them from the disk. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory) as file:
        block = os.urandom(1 << 20)
        started = clock()
        for _ in range(PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = clock()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        reading = clock()
        while file.read(1 << 20):
            pass
        return written - started, clock() - reading
