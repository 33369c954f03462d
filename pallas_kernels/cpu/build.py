"""Compiles the native library: `python pallas_kernels/cpu/build.py [OUT]`. setup.py does it when tierax is installed.

A plain shared object of C++17: nothing of Python is in it, so one file serves every Python of a platform. Needs a compiler
(`CXX`, or c++, g++ or clang++ on the path) and jaxlib, for XLA's headers. Standard library only: it runs before
anything is installed, and imports nothing of this package.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libtierax_cpu.so"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
"""No contraction: kernels say themselves where a product and a sum are rounded once."""
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
INSTRUCTION_SETS = {
    "x86_64": {"plain": (), "avx2": AVX2, "avx512": AVX512},
    "amd64": {"plain": (), "avx2": AVX2, "avx512": AVX512},
    "aarch64": {"neon": ()},
    "arm64": {"neon": ()},
}
"""Machine -> the flags that kernels.cc is compiled with, once for each; library.cc chooses among them at run time."""


class BuildError(Exception):
    """Why there is no library, in one line, or with what the compiler said below it."""


def build(out: Path, flags: Sequence[str] = (), driver: Path | None = None) -> None:
    """Compiles everything and links it to `out`; `flags` come last. With a `driver` source `out` is a program of the
    kernels and that, without the parts that talk to XLA. Raises BuildError."""
    compiler = find_compiler()
    handlers = [] if driver else [f"{name}_handler.cc" for name in ("linear", "attention", "layers")]
    units: dict[str, tuple[Path, tuple[str, ...]]] = {
        name: (SOURCES / name, ("-isystem", str(jaxlib_headers()))) for name in handlers
    }
    units["library"] = (SOURCES / "library.cc", ())
    if driver:
        units["driver"] = (driver, ("-I", str(SOURCES)))
    for isa, isa_flags in INSTRUCTION_SETS.get(platform.machine().lower(), {"plain": ()}).items():
        units[isa] = (SOURCES / "kernels.cc", isa_flags)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile(name: str) -> str:
            source, own_flags = units[name]
            target = str(Path(objects) / f"{name}.o")
            _run([*compiler, *FLAGS, *own_flags, *flags, "-c", str(source), "-o", target])
            return target

        linked = list(pool.map(compile, units))
        # Linked beside its place and moved there: a process that has the old library mapped keeps it whole.
        fresh = out.with_name(f".{out.name}.new")
        _run([*compiler, *FLAGS, *flags, *([] if driver else ["-shared"]), *linked, "-o", str(fresh)])
        fresh.replace(out)


def find_compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C++ compiler: install g++ or clang++, or name one by CXX")


def jaxlib_headers() -> Path:
    spec = find_spec("jaxlib")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (Path(folder) / "include" / "xla" / "ffi" / "api" / "ffi.h").is_file():
            return Path(folder) / "include"
    raise BuildError("no jaxlib in this Python, whose headers are needed: install jax first")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error.strerror}") from None
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES / LIBRARY)
    except BuildError as error:
        sys.exit(str(error))
