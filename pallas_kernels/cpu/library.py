"""The native library: found beside this file, loaded once, its handlers made known to XLA."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax

from .build import LIBRARY

PATH = Path(__file__).with_name(LIBRARY)
"""Where the build of a wheel, and of an editable install, puts it."""
HANDLERS = ("tierax_linear", "tierax_grouped_linear", "tierax_attend", "tierax_write_kv", "tierax_layers")
"""Symbols of the library, and the names of `jax.ffi.ffi_call`."""


class Library(NamedTuple):
    """The library in use, or why there is none."""

    isa: str
    """Instruction set of its kernels on this machine: avx512, avx2, neon or plain; empty without a library."""
    absence: str = ""
    """One line for a user; empty with a library."""


@cache
def library() -> Library:
    """Loads the library and registers its handlers, the first time that it is asked for."""
    return load(PATH)


def load(path: Path) -> Library:
    """The same for a library elsewhere; what XLA calls is the one that was loaded last."""
    # Once the CPU backend is up, XLA refuses a handler here; before, it would be the backend that fails to start.
    jax.devices("cpu")
    if not path.exists():
        return Library(
            "", f"no {path.name}: tierax was installed without a C++17 compiler or jaxlib's headers"
        )
    try:
        shared = ctypes.CDLL(str(path))
        handlers = {name: jax.ffi.pycapsule(getattr(shared, name)) for name in HANDLERS}
        isa = shared.tierax_isa
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
        reason = str(error).splitlines()[0]
        return Library("", f"{path.name} cannot be used, install tierax anew: {reason}")
    isa.restype = ctypes.c_char_p
    return Library(isa().decode())
