"""Memory of arrays on a CPU in huge pages.

What reads gigabytes per step otherwise waits for the translation of an address every 4 KiB: a quarter of a decode step's time, more where
the machine is a virtual one. NumPy asks for huge pages when it allocates; XLA does not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import jax

HUGE = 2 << 20
"""Bytes of a huge page on x86-64, and on ARM with pages of 4 KiB."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def use_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """Moves what these arrays have on CPUs of this process to huge pages, where the system can (Linux 6.1 and later); contents and addresses
    stay. Returns the bytes of it that lie in huge pages now; what else lies beside an array in its first and last one is not counted.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for begin, end in merged(_spans(arrays)):
        first, last = begin // HUGE * HUGE, -(-end // HUGE) * HUGE
        # Where it has not been allowed for all memory, it is for what is advised.
        madvise(first, last - first, _MADV_HUGEPAGE)
        # One by one: the ends may stick out into what is not mapped.
        for page in range(first, last, HUGE):
            if madvise(page, HUGE, _MADV_COLLAPSE) == 0:
                moved += min(end, page + HUGE) - max(begin, page)
    return moved


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans [begin, end) in order; those that share a huge page, or touch, are one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= -(-found[-1][1] // HUGE) * HUGE:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _spans(arrays: Iterable[jax.Array]) -> Iterable[tuple[int, int]]:
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device.platform != "cpu":
                continue
            begin = shard.data.unsafe_buffer_pointer()
            yield begin, begin + shard.data.nbytes
