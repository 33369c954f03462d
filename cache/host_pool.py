"""L2: pages in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

ALIGNMENT = 64
"""Bytes: a cache line, and what devices ask of memory that they read in place."""


def aligned_rows(rows: int, row_bytes: int) -> np.ndarray:
    """u8 `[rows, row_bytes]`, every row contiguous and aligned. Not touched: memory is taken when it is written to."""
    stride = -(-row_bytes // ALIGNMENT) * ALIGNMENT
    raw = np.empty(rows * stride + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + rows * stride].reshape(rows, stride)[:, :row_bytes]


class HostPool:
    """One slab of rows, a page each. Who owns which row, and what is in it, is known elsewhere."""

    def __init__(self, rows: int, page_bytes: int) -> None:
        if rows < 0 or page_bytes < 1:
            raise ValueError(
                f"a host pool of {rows} rows of {page_bytes} bytes: rows must be >= 0, bytes >= 1"
            )
        self.slab = aligned_rows(rows, page_bytes)
        self.num_rows = rows
        self.page_bytes = page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory once every row was written to."""
        return self.num_rows * (self.slab.strides[0] if self.num_rows else 0)

    def put(self, pages: np.ndarray, rows: Sequence[int]) -> None:
        """Copies u8 `[n, page_bytes]` into `rows`."""
        for at, row, count in _runs(rows):
            np.copyto(self.slab[row : row + count], pages[at : at + count])

    def get(self, rows: Sequence[int], pages: np.ndarray) -> None:
        """Copies `rows` into the first rows of u8 `[>= n, page_bytes]`."""
        for at, row, count in _runs(rows):
            np.copyto(pages[at : at + count], self.slab[row : row + count])

    def row(self, row: int) -> memoryview:
        """The bytes of a row, to read from and write to."""
        return self.slab[row].data


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position, first row, length) of each stretch of consecutive rows: a copy each. Every copy lets go of the GIL and
    has to get it again, so few large ones disturb the engine's thread, and are disturbed by it, less."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield start, rows[start], end - start
            start = end
