"""The backend `mosaic-gpu`: Mosaic GPU kernels for Hopper (compute capability 9.0)."""

from __future__ import annotations

from functools import partial

from ..experts import looped_linear
from ..kernels import AttentionShape, Kernels, Target
from ..linear import linear
from ..pages import write_kv
from .blocks import PREFILL, ROWS

PAGE_SIZES = (16, 32, 64, 128, 256)
"""A KV block is a whole number of pages, or a page a whole number of blocks; a copy's tiles have 8 rows."""


def refuses(target: Target, shape: AttentionShape) -> str | None:
    """Why not, see `attention.Backend`.

    Only 9.0: these are Hopper's warpgroup matrix products, which neither Ampere has nor Blackwell (10.0, whose tensor
    cores are programmed another way). Not f32: the product with V reads it across the order that it lies in, which these
    products do with 16-bit values only. Not fp8: the rows of a head, with their scales behind them, are no multiple of
    the 16 bytes that bulk copies step by.
    """
    if target.platform != "gpu" or target.generation != "9.0":
        return "needs a GPU of compute capability 9.0 (Hopper)"
    if shape.dtype != "bf16":
        return "needs bf16 queries"
    if shape.kv_dtype != "bf16":
        return f"needs bf16 KV, not {shape.kv_dtype}"
    if shape.head_dim not in PREFILL:
        return f"no block sizes for head_dim {shape.head_dim}: has {', '.join(map(str, PREFILL))}"
    if shape.heads // shape.kv_heads > ROWS:
        return f"serves up to {ROWS} query heads per KV head, and there are {shape.heads // shape.kv_heads}"
    if shape.page_size not in PAGE_SIZES:
        return f"needs pages of {', '.join(map(str, PAGE_SIZES))} tokens"
    return None


def kernels(target: Target, shape: AttentionShape) -> Kernels:
    # Not before: every start asks this module, and Mosaic takes long to load.
    from .hopper_attention import attend

    return Kernels("mosaic-gpu", attend, write_kv, linear, partial(looped_linear, most_rows=128))
