"""Mosaic GPU's interpreter, made fast enough for a test suite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import jax


def interpret_params() -> Any:
    """`InterpretGPUParams`, which jax 0.10.2 exports nowhere. Memory that nobody wrote reads as NaN."""
    module = import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return module.InterpretGPUParams(uninitialized_memory="nan")


@contextmanager
def compiled_once() -> Iterator[None]:
    """Within this, a kernel's program is compiled once: by itself the interpreter (of jax 0.10.2) compiles it anew for
    each warpgroup of each grid point, a second each, though it is the same every time."""
    module: Any = import_module("jax._src.pallas.mosaic.interpret.thread_map")
    core: Any = import_module("jax.core")
    original, lock, programs = module._run_jaxpr, threading.Lock(), {}

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        with lock:
            if id(jaxpr) not in programs:
                program = jax.jit(lambda consts, *args: core.eval_jaxpr(jaxpr, consts, *args))
                # With the program itself, so that its id is not given to another.
                programs[id(jaxpr)] = program.lower(consts, *args).compile(), jaxpr
        programs[id(jaxpr)][0](consts, *args)

    module._run_jaxpr = run
    try:
        yield
    finally:
        module._run_jaxpr = original
