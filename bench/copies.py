"""How fast pages move between the tiers, beside plain copies and plain reads of the same bytes in the same run."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..cache.device_pool import DevicePool
from ..cache.disk.page_records import PageRecords
from ..cache.disk.record import PageLayout
from ..cache.disk.share import Share
from ..cache.disk.store import READ_CONCURRENCY, PageStore
from ..cache.host_pool import HostPool
from ..cache.malloc import keep_freed_memory
from ..cache.mover import TierMover
from ..cache.moves import Move
from ..cache.page_keys import PageKey
from ..pallas_kernels.pages import PoolShape
from .bounds import Clock
from .raw_io import files_below, make_cold, pread_seconds

POLL_S = 0.0005
"""Seconds between two looks at the copies, as an engine takes between its steps."""


def measure_copies(
    page_bytes: int,
    *,
    clock: Clock,
    directory: str | os.PathLike[str] | None,
    pages: int = 120,
    repeats: int = 7,
) -> list[dict[str, Any]]:
    """Four rows of `path`, `gb_s`, `memcpy_gb_s` (or `pread_gb_s`) and their `ratio`; medians of `repeats`.

    Pages lie scattered in all tiers. The two sides of a ratio take turns, so that both see the same machine. The
    disk's pages are written below `directory` (None: the system's place for temporary files), and removed at the end.
    Raises RuntimeError if a page does not arrive.
    """
    keep_freed_memory()
    with tempfile.TemporaryDirectory(dir=directory, prefix="copies-") as place:
        bench = _Bench(page_bytes, pages, Path(place), clock)
        try:
            return bench.rows(repeats)
        finally:
            bench.close()


class _Bench:
    """A mover between a device pool, a host pool and a store, with plain buffers of the same size beside it."""

    def __init__(self, page_bytes: int, pages: int, directory: Path, clock: Clock) -> None:
        # To a copy, a page is a row of bytes: one layer with one token and one head is as good as many.
        shape = PoolShape(2 * pages, 1, 1, 1, page_bytes // 8)
        self._pool = DevicePool(shape, jnp.dtype(jnp.float32))
        for _ in self._pool.warm_up():
            pass
        rng = np.random.default_rng(0)
        self._clock = clock
        self._bytes = pages * self._pool.page_bytes
        self._pages: list[int] = rng.permutation(2 * pages)[:pages].tolist()
        self._rows: list[int] = rng.permutation(2 * pages)[:pages].tolist()
        self._keys = [PageKey(bytes(16), i.to_bytes(16, "big"), bytes(16), i) for i in range(pages)]
        host = HostPool(2 * pages, self._pool.page_bytes)
        host.slab[:] = 1
        self._source = np.ones(self._bytes, np.uint8)
        self._target = np.zeros(self._bytes, np.uint8)
        self._directory = directory
        self._store = PageStore(directory)
        self._mover = TierMover(
            self._pool,
            host,
            clock=clock,
            records=PageRecords(self._store, Share.whole(PageLayout((self._pool.page_bytes,), "uint8"))),
        )

    def close(self) -> None:
        self._mover.close()
        self._store.close()

    def rows(self, repeats: int) -> list[dict[str, Any]]:
        down = self._compare("device->host", repeats, self._save, "memcpy", self._memcpy)
        up = self._compare("host->device", repeats, self._load, "memcpy", self._memcpy)
        self._wait(self._mover.write(self._keys, self._rows))
        files = sorted(files_below(self._directory))
        # Reads of a store come in no order of the files; so do the plain ones.
        files = [files[i] for i in np.random.default_rng(1).permutation(len(files))]

        def plain() -> float:
            return pread_seconds(files, self._clock, READ_CONCURRENCY)

        cold = self._compare("disk->host cold", repeats, self._read, "pread", plain, lambda: make_cold(files))
        warm = self._compare("disk->host warm", repeats, self._read, "pread", plain)
        return [down, up, cold, warm]

    def _compare(
        self,
        path: str,
        repeats: int,
        ours: Callable[[], float],
        name: str,
        plain: Callable[[], float],
        prepare: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        times: tuple[list[float], list[float]] = ([], [])
        # The first round takes the memory that later ones use again.
        for number in range(repeats + 1):
            for measure, found in zip((ours, plain), times, strict=True):
                prepare()
                seconds = measure()
                if number:
                    found.append(seconds)
        gb_s, plain_gb_s = (self._bytes / statistics.median(found) / 1e9 for found in times)
        return {"path": path, "gb_s": gb_s, f"{name}_gb_s": plain_gb_s, "ratio": gb_s / plain_gb_s}

    def _memcpy(self) -> float:
        started = self._clock()
        np.copyto(self._target, self._source)
        return self._clock() - started

    def _save(self) -> float:
        started = self._clock()
        self._wait(self._mover.save(self._pages, self._rows))
        return self._clock() - started

    def _load(self) -> float:
        started = self._clock()
        self._wait(self._mover.load(self._rows, self._pages))
        self._pool.array.block_until_ready()
        return self._clock() - started

    def _read(self) -> float:
        started = self._clock()
        self._wait(self._mover.read(self._keys, self._rows))
        return self._clock() - started

    def _wait(self, move: Move) -> None:
        while not move.done:
            time.sleep(POLL_S)
            self._mover.poll(self._clock())
        _check(move.outcomes, move.kind)


def _check(outcomes: Sequence[Any], kind: str) -> None:
    bad = {outcome.value for outcome in outcomes if outcome.value != "ok"}
    if bad:
        raise RuntimeError(f"pages did not arrive in a {kind}: {', '.join(sorted(bad))}")
