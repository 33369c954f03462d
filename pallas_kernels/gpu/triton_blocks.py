"""Block sizes of the Triton kernels: stated, so that a program can be compiled for a GPU that is not here."""

from __future__ import annotations

from typing import NamedTuple

from ..kernels import AttentionShape, Target


class Blocks(NamedTuple):
    """How the two kernels cut their work."""

    chunk_queries: int
    """Rows of scores in a program of the chunk kernel: tokens times heads of a group; a power of two, 16 or more."""
    chunk_kv: int
    """KV tokens per iteration there; a power of two, 16 or more."""
    chunk_warps: int
    chunk_stages: int
    """Iterations whose loads are in flight at a time, each with shared memory of its own."""
    decode_kv: int
    """KV tokens per iteration of the decode kernel."""
    decode_warps: int
    decode_stages: int
    decode_pieces: int
    """Pieces that the decode kernel cuts all contexts into, over all KV heads, beyond one per row."""


_CORES = {"8.0": 108, "8.6": 84, "8.7": 16, "8.9": 128, "9.0": 132, "10.0": 148, "12.0": 170}
"""Multiprocessors of the largest common GPU of a compute capability (A100, RTX 3090, Orin, RTX 4090, H100, B200,
RTX 5090). On a smaller one the pieces are merely finer than they need be."""
_DEFAULT_CORES = 108
_WAVES = 3
"""Pieces per multiprocessor: two or three of these programs fit one, and pieces end unevenly."""

_SIZES = {
    # bf16 KV, on tensor cores. 128 rows of scores read K and V half as often as 64 do, and take eight warps to keep
    # their sums in registers; at width 256 even those cannot. Decoding is bound by memory: three or four programs
    # fit a multiprocessor, each with 16 to 32 KiB on their way.
    ("bf16", 16): (128, 64, 4, 3, 128, 4, 3),
    ("bf16", 32): (128, 64, 4, 3, 128, 4, 3),
    ("bf16", 64): (128, 64, 8, 3, 128, 4, 3),
    ("bf16", 128): (128, 32, 8, 3, 64, 4, 3),
    ("bf16", 256): (64, 32, 8, 2, 32, 4, 3),
    # 8-bit KV: the same products, but its codes arrive four bytes at a time, with a pointer each, and leave as pairs:
    # blocks are half as large where registers run out.
    ("fp8", 16): (128, 64, 4, 3, 128, 4, 3),
    ("fp8", 32): (128, 64, 4, 3, 128, 4, 3),
    ("fp8", 64): (128, 32, 8, 3, 64, 4, 3),
    ("fp8", 128): (64, 32, 8, 3, 32, 4, 3),
    ("fp8", 256): (64, 16, 8, 3, 16, 4, 3),
    # f32 products, on the ordinary units: for checking, not for speed. Their code is unrolled and grows with the tile.
    ("f32", 16): (64, 32, 8, 2, 64, 4, 2),
    ("f32", 32): (64, 32, 8, 2, 64, 4, 2),
    ("f32", 64): (64, 32, 8, 2, 64, 4, 2),
    ("f32", 128): (32, 32, 8, 2, 32, 4, 2),
    ("f32", 256): (32, 16, 8, 2, 16, 4, 2),
    # Codes that become f32 operands: the smallest blocks, and a few registers on the stack all the same.
    ("f32 of fp8", 16): (32, 32, 8, 2, 32, 8, 2),
    ("f32 of fp8", 32): (32, 32, 8, 2, 32, 8, 2),
    ("f32 of fp8", 64): (32, 32, 8, 2, 32, 8, 2),
    ("f32 of fp8", 128): (16, 32, 8, 2, 16, 8, 2),
    ("f32 of fp8", 256): (16, 16, 8, 1, 16, 8, 1),
}
"""What products are taken of and the padded head width -> the sizes above, in their order, but for the pieces.

Chosen by what the compiler says for compute capability 8.0: the largest that need no stack for registers (255 per
thread), or nearly none. Shared memory stays below 76 KiB, where Ada and the smaller Amperes have 99 per program.
"""

WIDEST = 256
"""The largest head_dim."""
MOST_GROUPED = 64
"""The most query heads per KV head, whose sums must fit the registers of one program."""


def power_of_two(n: int) -> int:
    """The smallest one that is not below n: the only sizes that Triton's blocks may have."""
    return 1 << (n - 1).bit_length()


def padded_width(head_dim: int) -> int:
    """Columns that hold a head: matrix units take 16 at least."""
    return max(16, power_of_two(head_dim))


def products_of(dtype: str, kv_dtype: str) -> str:
    """f32 where either side is; else of bf16, in which the codes of 8-bit KV are exact."""
    if kv_dtype == "fp8":
        return "f32 of fp8" if dtype == "f32" else "fp8"
    return "f32" if "f32" in (dtype, kv_dtype) else "bf16"


def blocks_for(target: Target, shape: AttentionShape) -> Blocks:
    """For a target and a shape that the backend does not refuse."""
    sizes = _SIZES[products_of(shape.dtype, shape.kv_dtype), padded_width(shape.head_dim)]
    cores = _CORES.get(target.generation, _DEFAULT_CORES)
    return Blocks(*sizes, decode_pieces=max(1, cores * _WAVES // shape.kv_heads))
