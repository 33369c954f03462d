"""Block sizes of the TPU attention kernel: one table by generation, and how a row of it is fitted to a shape.

The sizes follow from published bandwidths, matrix rates and memory sizes. They are compiled for, not tuned: no figure here
comes from a run on such a chip.
"""

from __future__ import annotations

from typing import NamedTuple

from ..kernels import AttentionShape
from ..quant import SCALE_BYTES

MIB = 1 << 20
LANES = 128
"""Width of a vector register: the last axis of everything in memory is padded to multiples of it."""
_BYTES = {"f32": 4, "bf16": 2, "fp8": 1}


class Blocks(NamedTuple):
    """Of one kernel call."""

    q_tokens: int
    """Query tokens per tile."""
    kv_tokens: int
    """KV tokens per block, rounded to whole pages."""
    buffers: int
    """Blocks in VMEM: one is computed on while the others arrive."""

    def pages(self, page_size: int) -> int:
        """Pages per block."""
        return max(1, self.kv_tokens // page_size)


class Tuning(NamedTuple):
    """A generation's row of the table."""

    decode_buffers: int
    """Blocks of up to `DECODE_BLOCK` that decodes keep in VMEM. All but one are on their way, and have to cover what the
    memory delivers within a latency of about 1.5 us: 1.2 MiB on v5e (0.8 TB/s), 2.4 on v6e (1.6), 4 on v5p (2.8) and
    5.5 on tpu7x (3.7 per core)."""
    chunk_rows: int
    """Query tokens times heads that share a KV head, per tile. A pass of 512 rows over KV does 512 operations per byte
    of bf16, where v5e's matrix units need 240 to be busy, v5p's 170, tpu7x' 310, but v6e's 560: so it has more rows."""
    chunk_tokens: int
    """KV tokens per block of a chunk: enough that rescaling the sums is rare next to the products."""
    vmem_bytes: int
    """What the compiler may take: a part of 128 MiB (tpu7x: 64), as XLA prefetches weights into the rest."""


TUNING = {
    "v5e": Tuning(3, 512, 256, 48 * MIB),
    "v5p": Tuning(6, 512, 256, 48 * MIB),
    "v6e": Tuning(4, 1024, 256, 64 * MIB),
    "tpu7x": Tuning(7, 512, 256, 40 * MIB),
}
DECODE_BLOCK = MIB
"""Bytes of KV per block of a decode, where that is within `DECODE_TOKENS`."""
DECODE_TOKENS = (128, 512)
"""Bounds to the tokens of such a block: fewer leave matrix units idle, more are masked out where contexts are short."""
CHUNK_TOKENS = (16, 256)
"""Bounds to the query tokens of a tile; more are masked out along the diagonal."""
KV_SHARE = 3
"""Blocks of KV take a third of VMEM at most."""
QUERY_SHARE = 2
"""Queries, and what is computed of them, take a half at most; the rest is for scores."""


def fits(generation: str, shape: AttentionShape) -> bool:
    """Whether two pages, the least that a block and the next one can be, fit their share of VMEM."""
    return 2 * shape.page_size * token_bytes(shape) <= TUNING[generation].vmem_bytes // KV_SHARE


def blocks(generation: str, shape: AttentionShape) -> tuple[Blocks, Blocks]:
    """Block sizes of decodes and of chunks, for a generation of `TUNING` and a shape that `fits`."""
    tuning, token = TUNING[generation], token_bytes(shape)
    room = tuning.vmem_bytes // KV_SHARE // token

    def block(q_tokens: int, wanted: int, buffers: int) -> Blocks:
        tokens = (
            max(min(_power_of_two(wanted), room // 2), shape.page_size) // shape.page_size * shape.page_size
        )
        return Blocks(q_tokens, tokens, max(2, min(buffers, room // tokens)))

    low, high = DECODE_TOKENS
    decode = block(1, min(max(DECODE_BLOCK // token, low), high), tuning.decode_buffers)
    low, high = CHUNK_TOKENS
    q_tokens = tuning.chunk_rows // (shape.heads // shape.kv_heads)
    q_tokens = min(q_tokens, tuning.vmem_bytes // QUERY_SHARE // query_bytes(shape))
    return decode, block(_power_of_two(min(max(q_tokens, low), high)), tuning.chunk_tokens, 2)


def token_bytes(shape: AttentionShape) -> int:
    """Bytes that one token's KV of one layer takes on the device: a tile of memory has 128 lanes, and as many rows as
    there are heads, rounded up to a power of two, at least a 32-bit word's worth and at most 8."""
    itemsize = _BYTES[shape.kv_dtype]
    width = 2 * shape.head_dim + (SCALE_BYTES if shape.kv_dtype == "fp8" else 0)
    tile = min(8, max(1 << (shape.kv_heads - 1).bit_length(), 4 // itemsize))
    heads = 1 if shape.kv_heads == 1 else _padded(shape.kv_heads, tile)
    return heads * _padded(width, LANES) * itemsize


def query_bytes(shape: AttentionShape) -> int:
    """Bytes that one query token takes in the kernel: three times as it is in HBM (two that come, one that goes), as
    operands by KV head, as sums and results in f32, and two columns of a register's width for the softmax."""
    itemsize = _BYTES[shape.dtype]
    width = _padded(shape.head_dim, LANES)
    wide = width if width == shape.head_dim else _padded(2 * shape.head_dim, LANES)
    return _padded(shape.heads, 8) * ((3 * itemsize + 4) * width + (itemsize + 4) * wide + 2 * 4 * LANES)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _power_of_two(size: int) -> int:
    """The largest one up to `size`."""
    return 1 << (size.bit_length() - 1)
