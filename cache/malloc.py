"""The C library's allocator, told to keep memory that is freed."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 32 << 20
"""Larger blocks are mapped and unmapped one by one; glibc allows no more than this."""
_MOST_KEPT = 256 << 20
"""Free bytes at the end of an arena that are not given back to the system."""


def keep_freed_memory() -> bool:
    """Lets records of pages be read into memory that was used before. False where the C library has no such setting.

    By default glibc unmaps every block of a page's size when it is freed, and the system zeroes another one for the
    next record, page by page: that costs more than reading the record out of the system's file cache. The setting is
    the process's, so it belongs into a program's start.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT))
