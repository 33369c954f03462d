"""Block sizes of the Hopper kernels, stated per head size: nothing is read from the device that compiles them.

Bounds, compute capability 9.0: 227 KiB of shared memory per thread block; 65,536 registers per multiprocessor, of which
`compute_warpgroups` at COMPUTE_REGISTERS and one that only copies at COPY_REGISTERS must take no more.
"""

from __future__ import annotations

from typing import NamedTuple

SHARED_BYTES = (227 - 4) * 1024
"""Most that one thread block may have, less what barriers and alignment take."""
MULTIPROCESSORS = 132
"""Of an H100 SXM or H200: how many thread blocks a decode should be split into, at least."""
ROWS = 64
"""Of one warpgroup's matrix product (`wgmma` has no other)."""
COMPUTE_REGISTERS = 232
COPY_REGISTERS = 40


class Blocks(NamedTuple):
    """Of one kernel, for one head size."""

    compute_warpgroups: int
    """Prefill: each has 64 query tokens of its own, and all read the same KV. Decode: they take turns at KV blocks."""
    kv_tokens: int
    """KV tokens per step of a warpgroup: its scores take half as many registers."""
    stages: int
    """KV blocks in shared memory, in use or on their way."""
    swizzle: int
    """Bytes of a row of a shared-memory tile; a tile may not cross from K to V, so it divides the bytes of a head."""

    def shared_bytes(self, head_dim: int, *, float_rows: bool) -> int:
        """Shared memory of a thread block: the ring of KV blocks, the queries, and a decode's staged f32 results."""
        ring = self.stages * self.kv_tokens * 2 * head_dim * 2
        queries = ROWS * head_dim * 2
        if not float_rows:
            return ring + self.compute_warpgroups * queries
        return ring + queries + self.compute_warpgroups * ROWS * (head_dim + 1) * 4


PREFILL = {
    # Two warpgroups share each KV block, which halves the traffic from L2.
    # Registers of a head of 128: 64 for scores, 32 for weights, 64 for the weighted sum, of the 232.
    64: Blocks(2, 128, 4, 128),
    80: Blocks(2, 128, 2, 32),
    96: Blocks(2, 128, 2, 64),
    128: Blocks(2, 128, 2, 128),
    # The weighted sum alone takes 128 registers, so the rest must do with half.
    256: Blocks(2, 64, 2, 128),
}
DECODE = {
    # Only bytes in flight matter: 25 GB/s and 1 us of latency per multiprocessor want 32 KiB on their way at all times.
    64: Blocks(2, 64, 6, 128),
    80: Blocks(2, 64, 4, 32),
    96: Blocks(2, 64, 4, 64),
    128: Blocks(2, 64, 4, 128),
    # Results of a second warpgroup would not fit; blocks are so long in coming that one keeps up.
    256: Blocks(1, 32, 3, 64),
}


def decode_splits(rows: int, kv_heads: int, max_tokens: int, blocks: Blocks) -> int:
    """Thread blocks per row and KV head: two per multiprocessor in all, each with a few KV blocks per warpgroup at least."""
    wanted = -(-2 * MULTIPROCESSORS // (rows * kv_heads))
    most = max(1, max_tokens // (4 * blocks.compute_warpgroups * blocks.kv_tokens))
    return max(1, min(wanted, most))
