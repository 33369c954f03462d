"""Records straight into the memory where they are wanted.

tensorstore hands a value over as an object of its own, of which Python must make bytes before it can look at them: two
copies more than there need be. Files of a local directory are plain files, and are read in one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from ..moves import Outcome


def read_file_into(path: str, buffers: Sequence[memoryview]) -> Outcome:
    """Reads a whole file into `buffers`, one after the other; CORRUPT, with as much of it as goes in, unless it is exactly as
    long. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Usually one call is enough; a byte more than is wanted shows a file that is too long.
        missing = [*buffers, memoryview(bytearray(1))]
        while count := os.readv(file, missing):
            while missing and count >= missing[0].nbytes:
                count -= missing.pop(0).nbytes
            if len(missing) <= 1:
                break
            missing[0] = missing[0][count:]
        return Outcome.OK if len(missing) == 1 else Outcome.CORRUPT
    finally:
        os.close(file)


def copy_into(record: bytes, buffers: Sequence[memoryview]) -> Outcome:
    """The same with a record that is in memory."""
    start = 0
    for buffer in buffers:
        count = min(buffer.nbytes, len(record) - start)
        # NumPy copies without the GIL.
        np.copyto(np.frombuffer(buffer[:count], np.uint8), np.frombuffer(record, np.uint8, count, start))
        start += count
    return Outcome.OK if len(record) == sum(buffer.nbytes for buffer in buffers) else Outcome.CORRUPT
