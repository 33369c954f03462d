"""The native CPU kernels as a backend of `attention.BACKENDS`."""

from __future__ import annotations

from ..kernels import AttentionShape, Kernels, Target
from .attention import attend, write_kv
from .experts import grouped_linear
from .layers import NativeLayers
from .library import library
from .linear import exact_linear, linear


def refuses(target: Target, shape: AttentionShape) -> str | None:
    if target.platform != "cpu":
        return "needs a CPU"
    return library().absence or None


def kernels(target: Target, shape: AttentionShape) -> Kernels:
    # Where KV is rounded to few bits, a difference in an f32's last bit may become one in a stored value: a prompt whose
    # beginning was cached would be answered a little otherwise than one that was not.
    exact = shape.kv_dtype != "f32"
    product = exact_linear if exact else linear
    layers = NativeLayers(exact=exact)
    return Kernels("native", attend, write_kv, product, grouped_linear, layers, detail=library().isa)
