"""Ragged paged attention: the one entry. Which backend runs is chosen here, once, when a step is built."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from .kernels import AttentionShape, Kernels, Target

BACKENDS = {
    "native": "cpu.backend",
    "tpu": "tpu.backend",
    "mosaic-gpu": "gpu.mosaic",
    "triton": "gpu.triton",
    "xla": "xla",
}
"""Name -> module of this package, the best first: `auto` takes the first that serves the target and the shape."""


class Backend(Protocol):
    """What such a module has."""

    def refuses(self, target: Target, shape: AttentionShape) -> str | None:
        """Why this backend cannot serve, in a few words ("needs a TPU"); None when it can."""
        ...

    def kernels(self, target: Target, shape: AttentionShape) -> Kernels:
        """The kernels for a target and shape that are not refused. Runs nothing."""
        ...


def select(target: Target, shape: AttentionShape, backend: str = "auto") -> Kernels:
    """The kernels of the backend called `backend`; `auto` takes the best one that serves.

    Raises ValueError for an unknown name, and when the named backend refuses the target or the shape.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(
            f"unknown attention backend {backend!r}: choose auto or one of {', '.join(BACKENDS)}"
        )
    for name in BACKENDS if backend == "auto" else (backend,):
        module = _load(name)
        reason = module.refuses(target, shape)
        if reason is None:
            return module.kernels(target, shape)
        if backend != "auto":
            raise ValueError(f"attention backend {backend}: {reason}")
    raise AssertionError("xla serves every shape")


def refusals(target: Target, shape: AttentionShape) -> dict[str, str | None]:
    """Each backend, the best first, and why it cannot serve; None when it can."""
    return {name: _load(name).refuses(target, shape) for name in BACKENDS}


def _load(name: str) -> Backend:
    return import_module(f".{BACKENDS[name]}", __package__)  # pyright: ignore[reportReturnType]
