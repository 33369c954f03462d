"""Compiled programs that outlive the process: a later start neither traces nor compiles them.

jax's own compile cache is asked with a traced and lowered program, which for a model of 30 layers takes longer than loading
the result. Here a program is found by what it was made from, `fingerprint`, so that nothing is traced at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import platform
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

logger = logging.getLogger(__name__)

KEPT = 32
"""Sets of programs that a directory keeps, those that were used last."""

_SOURCES = ("engine", "models", "pallas_kernels")
"""Folders of the package that make programs."""
_LATER_ONLY = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
"""Settings of jax that say where programs are kept, not what they are."""


class ProgramStore:
    """The programs of one engine, below `directory / digest of what they are made from`.

    Loading a program runs what is in its file, so the directory is the user's own (0700): one that others may write to is not used.
    """

    def __init__(
        self,
        directory: Path | None,
        made_from: Sequence[object],
        devices: Sequence[Any],
        on_load: Callable[[], None] = lambda: None,
    ) -> None:
        """directory: None keeps nothing. made_from: all that programs depend on besides this package, jax, the
        machine and the arguments, by its `repr`; devices: those that run them; on_load: called for each that was found."""
        self._devices = list(devices)
        self._on_load = on_load
        self._place = None
        if directory is not None:
            try:
                self._place = _own(directory) / fingerprint(made_from, self._devices)
                self._place.mkdir(mode=0o700, exist_ok=True)
                os.utime(self._place)  # the order in which sets are forgotten
                _forget(directory)
            except OSError as error:
                logger.warning("compiled programs are not kept: %s", error)
                self._place = None

    def make(
        self, name: str, function: Any, arguments: tuple[Any, ...], static: dict[str, Any]
    ) -> jax.stages.Compiled:
        """The compiled program of a jitted function for arguments like these, loaded or compiled."""
        if self._place is None:
            return function.lower(*arguments, **static).compile()
        path = self._place / f"{name}-{_digest(_described(arguments), static)}"
        compiled = self._load(path, arguments)
        if compiled is None:
            with _JAX_CACHE.unused():
                compiled = function.lower(*arguments, **static).compile()
            self._save(path, compiled)
        return compiled

    def _load(self, path: Path, arguments: tuple[Any, ...]) -> jax.stages.Compiled | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            executable, out = pickle.loads(data)
            compiled = serialize_executable.deserialize_and_load(
                executable,
                jax.tree.structure((arguments, {})),
                jax.tree.structure(out),
                execution_devices=self._devices,
            )
        except Exception as error:  # whatever is wrong with a file, the program can be compiled
            logger.warning("compiled program %s cannot be loaded, and is made anew: %s", path.name, error)
            return None
        self._on_load()
        return compiled

    def _save(self, path: Path, compiled: jax.stages.Compiled) -> None:
        try:
            executable, _, out = serialize_executable.serialize(compiled)
            # An example instead of the tree's structure, which cannot be written with types of our own.
            data = pickle.dumps((executable, jax.tree.unflatten(out, range(out.num_leaves))))
            # Renamed when it is whole; of one that is not, nothing stays.
            with tempfile.TemporaryDirectory(dir=path.parent) as directory:
                file = Path(directory) / path.name
                file.write_bytes(data)
                os.replace(file, path)
        except Exception as error:  # a program that is not kept is compiled again next time
            logger.warning("compiled program %s is not kept: %s", path.name, error)


class Program:
    """A jitted function, with a compiled program for each variant of its arguments' shapes.

    The first call of a variant, or `prepare`, makes its program; later ones only run it.
    """

    def __init__(
        self, store: ProgramStore, name: str, function: Any, variant: Callable[..., Hashable]
    ) -> None:
        """function: jitted; its keyword arguments are static. variant: called with the arguments, tells programs apart."""
        self._store = store
        self._name = name
        self._function = function
        self._variant = variant
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        compiled = self._compiled.get(self._variant(*arguments, **static))
        if compiled is None:
            compiled = self.prepare(*arguments, **static)
        return compiled(*arguments)

    def prepare(self, *arguments: Any, **static: Any) -> jax.stages.Compiled:
        """Makes the program for arguments like these, arrays or `jax.ShapeDtypeStruct`s, and runs nothing."""
        variant = self._variant(*arguments, **static)
        if variant not in self._compiled:
            self._compiled[variant] = self._store.make(self._name, self._function, arguments, static)
        return self._compiled[variant]

    def lower(self, *arguments: Any, **static: Any) -> jax.stages.Lowered:
        """As that of the jitted function."""
        return self._function.lower(*arguments, **static)


def like(array: jax.Array, rows: int) -> jax.ShapeDtypeStruct:
    """An array as this one, but of so many rows."""
    return jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype, sharding=array.sharding)


def fingerprint(made_from: Sequence[object], devices: Sequence[Any]) -> str:
    """Digest of all that decides what a program is, but for its arguments: this package's sources and native library, jax
    and its settings, the machine, the devices, and `made_from`."""
    device = devices[0]
    settings = {name: value for name, value in jax.config.values.items() if name not in _LATER_ONLY}
    environment = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")]
    return _digest(
        _sources(Path(__file__).resolve().parent.parent),
        (jax.__version__, version("jaxlib"), device.client.platform_version),
        sorted(settings.items()),
        environment,
        (platform.machine(), _cpu_features()),
        [(each.platform, each.device_kind, each.id) for each in devices],
        [repr(part) for part in made_from],
    )


def _sources(package: Path) -> str:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".so"):
                digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _cpu_features() -> str:
    """What the CPU can do, as far as the system says: host code that was compiled for another one may not run."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _described(arguments: tuple[Any, ...]) -> list[str]:
    """Shapes, dtypes and places of all leaves, and how they hang together."""
    leaves, structure = jax.tree.flatten(arguments)
    return [str(structure), *(_leaf(leaf) for leaf in leaves)]


def _leaf(leaf: Any) -> str:
    placed = getattr(leaf, "format", None) or getattr(leaf, "sharding", None)
    return f"{leaf.dtype.name}{tuple(leaf.shape)} {placed}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=repr).encode()).hexdigest()[:32]


def _own(directory: Path) -> Path:
    """The directory, made if need be. Raises OSError for one that others may write to, or that is another user's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = directory.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{directory} is not this user's alone to write")
    return directory


def _forget(directory: Path) -> None:
    """Removes the sets that were not used for longest, beyond `KEPT`."""
    sets = sorted(
        (path for path in directory.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    for path in sets[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


class _JaxCache:
    """jax's own compile cache, of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._directory: str | None = None

    @contextlib.contextmanager
    def unused(self) -> Iterator[None]:
        """What comes out of it on a CPU cannot be written again: only what was compiled here can. Threads may be in here at
        the same time."""
        with self._lock:
            if self._users == 0:
                self._directory = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
                self._set(None)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._set(self._directory)

    def _set(self, directory: str | None) -> None:
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()


_JAX_CACHE = _JaxCache()
