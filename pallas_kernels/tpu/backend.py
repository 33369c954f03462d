"""The TPU backend: attention and KV writes by Mosaic kernels."""

from __future__ import annotations

from functools import partial

from ..kernels import AttentionShape, Kernels, Target
from ..linear import linear
from .attention import attend
from .blocks import TUNING, blocks, fits
from .experts import grouped_linear
from .write import write_kv

PAGE_SIZES = range(16, 257, 16)
HEAD_DIMS = range(16, 257, 16)


def refuses(target: Target, shape: AttentionShape) -> str | None:
    """See `attention.Backend`."""
    if target.platform != "tpu":
        return "needs a TPU"
    if target.generation not in TUNING:
        return f"knows no block sizes for TPU {target.generation or 'of unknown generation'}, only {', '.join(TUNING)}"
    if shape.page_size not in PAGE_SIZES:
        return f"needs pages of 16 to 256 tokens in multiples of 16, not {shape.page_size}"
    if shape.head_dim not in HEAD_DIMS:
        return f"needs a head_dim of 16 to 256 in multiples of 16, not {shape.head_dim}"
    if not fits(target.generation, shape):
        return f"pages of {shape.page_size} tokens with {shape.kv_heads} KV heads are too large for the TPU's VMEM"
    return None


def kernels(target: Target, shape: AttentionShape) -> Kernels:
    """See `attention.Backend`."""
    decode, chunk = blocks(target.generation, shape)
    vmem_bytes = TUNING[target.generation].vmem_bytes
    return Kernels(
        "tpu",
        partial(attend, decode=decode, chunk=chunk, vmem_bytes=vmem_bytes),
        write_kv,
        linear,
        grouped_linear,
    )
