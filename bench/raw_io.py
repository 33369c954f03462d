"""What the machine does without us: plain copies in memory, plain reads of files."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .bounds import Clock

READERS = 4
"""Threads that read files side by side; as many reads as the disk tier has under way at once."""
_BLOCK = 1 << 20


def memcpy_seconds(nbytes: int, clock: Clock, repeats: int = 5) -> float:
    """Median time of one copy between two buffers whose memory is there already."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    seconds = []
    for _ in range(repeats):
        started = clock()
        np.copyto(target, source)
        seconds.append(clock() - started)
    return statistics.median(seconds)


def pread_seconds(files: Sequence[Path], clock: Clock, readers: int = READERS) -> float:
    """Time to read whole files with `pread`, each by one of `readers` threads, from wherever they are now."""
    with ThreadPoolExecutor(readers) as pool:
        # So that no thread is started within the measurement.
        list(pool.map(lambda _: None, range(4 * readers)))
        started = clock()
        list(pool.map(_pread, files))
        return clock() - started


def files_below(directory: Path) -> set[Path]:
    return {file for file in directory.rglob("*") if file.is_file()}


def bytes_below(directory: Path) -> int:
    """Of all files in a directory and its subdirectories."""
    return sum(file.stat().st_size for file in files_below(directory))


def make_cold(files: Sequence[Path]) -> None:
    """Has the system drop the files from its cache, so that the next read goes to the disk.

    They are synced first, since unwritten pages are not dropped. Only Linux can do this; elsewhere they stay warm.
    """
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _pread(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        offset = 0
        while data := os.pread(descriptor, _BLOCK, offset):
            offset += len(data)
    finally:
        os.close(descriptor)
