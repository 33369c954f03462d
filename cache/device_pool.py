"""L1: the pages in device memory, and how they get out and in. The only module of the cache that knows jax."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from ..pallas_kernels.page_copies import (
    gather_loop,
    gather_rows,
    scatter_loop,
    scatter_rows,
    takes_loop,
    wire_dtype,
)
from ..pallas_kernels.pages import PoolShape
from .host_pool import aligned_rows

BATCH_PAGES = 32
BATCH_BYTES = 16 << 20
"""A batch is large enough to hide what a dispatch costs, and small enough that its second pass finds it in a cache."""
STAGING_BYTES = 256 << 20

T = TypeVar("T")


class Slots(Generic[T]):
    """A bounded number of equal buffers, made when first needed and used again. Thread safe."""

    def __init__(self, limit: int, make: Callable[[], T]) -> None:
        self.limit = limit
        self.made = 0
        self._make = make
        self._free: list[T] = []
        self._lock = threading.Lock()

    def take(self) -> T | None:
        """A buffer; None while all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self.made == self.limit:
                return None
            self.made += 1
        try:
            return self._make()
        except BaseException:
            self.lose()
            raise

    def give(self, buffer: T) -> None:
        """A buffer that is no longer used."""
        with self._lock:
            self._free.append(buffer)

    def lose(self) -> None:
        """A buffer that was taken no longer exists."""
        with self._lock:
            self.made -= 1


class Gathered:
    """Copies of pages, under way from the device. `release` it when its rows have been copied."""

    def __init__(
        self,
        slots: Slots[jax.Array | int],
        array: jax.Array,
        count: int,
        kept: bool,
        read: Callable[[jax.Array, int], np.ndarray],
    ) -> None:
        """read: gets so many pages `[n, ...]` out of the array."""
        self._read = read
        self._slots = slots
        self._array: jax.Array | None = array
        self._count = count
        self._kept = kept

    def is_ready(self) -> bool:
        """Whether `rows` would return at once."""
        return self._array is None or _is_ready(self._array)

    def rows(self) -> np.ndarray:
        """u8 `[n, page_bytes]`, valid until `release`; waits. Raises what the device raised."""
        assert self._array is not None, "released"
        try:
            pages = self._read(self._array, self._count)
        except BaseException:
            # A program that is handed a failed result fails as well: it must not be used again.
            self._array = None
            self._slots.lose()
            raise
        return pages.reshape(len(pages), -1).view(np.uint8)

    def release(self) -> None:
        """Lets the buffer be used again; no view of `rows` may be alive, or the next gather copies it all."""
        if self._array is not None:
            self._slots.give(self._array if self._kept else 0)
            self._array = None

    def abandon(self) -> None:
        """Instead of `release`, when nobody wants the rows: what is under way goes on, in a buffer given up."""
        if self._array is not None:
            self._array = None
            self._slots.lose()


class Staging:
    """Host memory that pages pass through on their way to the device."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        count = shape[0]
        page_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        raw = aligned_rows(1, count * page_bytes)
        self.rows = raw.reshape(count, page_bytes)
        """u8 `[batch_pages, page_bytes]`."""
        self.values = raw.reshape(-1).view(dtype).reshape(shape)
        self.uploaded: jax.Array | None = None
        self.home: Slots[Staging] | None = None


class DevicePool:
    """One array of pages, donated to every step; whoever runs a step replaces `array` in the same statement.

    `staging_bytes` bounds the buffers between device and host, half of it for each direction, at least a batch each.
    `gather` and `scatter` belong to the thread that runs the steps; staging may be filled by another one.
    """

    def __init__(
        self,
        shape: PoolShape,
        dtype: jnp.dtype,
        *,
        layout: Format | None = None,
        device: Any = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """layout: of the array in memory, see `pages.pool_format`; device: None is the default one."""
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        self.layout = layout
        self._device = device
        self.array: jax.Array = self._zeros()
        platform = next(iter(self.array.devices())).platform
        self._wire = wire_dtype(platform, self.dtype)
        self._loops = takes_loop(platform, self.dtype)
        # A loop keeps the pool's order in memory, whatever its shape (see `page_copies`).
        self._scatter_loops = self._loops or layout is not None
        fitting = max(1, min(BATCH_PAGES, BATCH_BYTES // self.page_bytes))
        self.batch_pages = 1 << (fitting.bit_length() - 1)
        """Pages that one gather or scatter moves at most."""
        self._buckets = (
            (self.batch_pages,)
            if self._loops
            else tuple(1 << i for i in range(self.batch_pages.bit_length()))
        )
        self._slot_limit = max(1, staging_bytes // 2 // self.batch_bytes)
        # Compiled programs belong to the pool: a second pool of the same shape elsewhere must not find them gone.
        self._gather, self._scatter = self._programs()
        self._new_slots()

    @property
    def placement(self) -> Any:
        """How the array lies, as every program that gives it back has to say; None: as the compiler likes."""
        return self.layout

    @property
    def page_bytes(self) -> int:
        """Of a page in the tiers below."""
        return self.shape.page_elements * self.dtype.itemsize

    @property
    def batch_bytes(self) -> int:
        """Bytes of one staging buffer."""
        return self.batch_pages * self.page_bytes

    @property
    def bytes_held(self) -> int:
        """Bytes of the buffers for pages on their way, in both directions."""
        return (self._blocks.made + self._stagings.made) * self.batch_bytes

    @property
    def staging_limit(self) -> int:
        """What `bytes_held` never exceeds."""
        return 2 * self._slot_limit * self.batch_bytes

    def gather(self, pages: Sequence[int]) -> Gathered | None:
        """Starts copying up to `batch_pages` pages as they are after all steps submitted so far.

        None while all buffers are in use.
        """
        block = self._blocks.take()
        if block is None:
            return None
        index, count = self._index(pages)
        try:
            if self._loops:
                array = self._gather(self.array, block, index, count)
            else:
                array = self._gather(self.array, index)
                self._start_copy(array)
        except BaseException:
            self._blocks.lose()
            raise
        return Gathered(self._blocks, array, len(pages), kept=self._loops, read=self._read)

    def take_staging(self) -> Staging | None:
        """A buffer to be filled; None while all are in use. Any thread; so `upload` and `give_back`."""
        slots = self._stagings
        with self._lock:
            while self._reading and _is_ready(self._reading[0][0]):
                self._return(self._reading.popleft()[1])
        staging = slots.take()
        if staging is not None:
            staging.home = slots
        return staging

    def upload(self, staging: Staging, count: int) -> None:
        """Starts the transfer of the first `count` rows, which must not change until the buffer is taken again."""
        # On CPU this is no transfer: the array shares the memory.
        staging.uploaded = self._put(staging, self._bucket(count))

    def scatter(self, staging: Staging, pages: Sequence[int]) -> None:
        """Puts the uploaded rows into `pages`, for all steps submitted from now on, and takes the buffer back."""
        assert staging.uploaded is not None, "not uploaded"
        index, count = self._index(pages)
        arguments = (staging.uploaded, index, count) if self._scatter_loops else (staging.uploaded, index)
        try:
            self.array, read = self._scatter(self.array, *arguments)
        except BaseException:
            self.give_back(staging)
            raise
        staging.uploaded = None
        with self._lock:
            self._reading.append((read, staging))

    def give_back(self, staging: Staging) -> None:
        """Takes back a buffer that will not be scattered."""
        if staging.uploaded is not None:
            # Its transfer may still be reading.
            with self._lock:
                self._reading.append((staging.uploaded, staging))
            staging.uploaded = None
        else:
            self._return(staging)

    def reset(self) -> None:
        """A new, empty array and new buffers, after a fault lost the old ones. What is under way ends in the old."""
        if not self.array.is_deleted():
            self.array.delete()
        self.array = self._zeros()
        self._new_slots()

    def warm_up(self) -> Iterator[None]:
        """Compiles every program that copies pages, by running each on scratch; yields after each."""
        scratch = self.shape.pages
        for bucket in self._buckets:
            gathered = self.gather([scratch] * bucket)
            assert gathered is not None, "in use before it is warm"
            gathered.rows()
            gathered.release()
            yield
            staging = self.take_staging()
            assert staging is not None, "in use before it is warm"
            staging.rows[:] = 0
            self.upload(staging, bucket)
            self.scatter(staging, [scratch] * bucket)
            jax.block_until_ready(self.array)
            yield

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """The same programs by name, to be looked into."""
        programs = {}
        for bucket in self._buckets:
            index, count = self._index([0] * bucket)
            pool = self.array
            batch = self._make_batch(bucket, self._wire)
            gather = (pool, batch, index, count) if self._loops else (pool, index)
            scatter = (pool, batch, index, count) if self._scatter_loops else (pool, batch, index)
            programs[f"gather {bucket}"] = self._gather.lower(*gather).compile()
            programs[f"scatter {bucket}"] = self._scatter.lower(*scatter).compile()
        return programs

    @property
    def num_programs(self) -> int:
        """Programs that `warm_up` compiles."""
        return 2 * len(self._buckets)

    def _return(self, staging: Staging) -> None:
        # Each to the slots it came from: after a reset these are gone.
        if staging.home is not None:
            staging.home.give(staging)
            staging.home = None

    def _index(self, pages: Sequence[int]) -> tuple[np.ndarray, np.int32]:
        """Pages of a batch, padded with scratch, and how many they are."""
        index = np.full(self._bucket(len(pages)), self.shape.pages, np.int32)
        index[: len(pages)] = pages
        return index, np.int32(len(pages))

    def _bucket(self, count: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= count)

    def _new_slots(self) -> None:
        # On CPU a gather writes into a buffer that exists: memory that is fresh every time would cost page faults.
        make = partial(self._make_batch, self.batch_pages, self.dtype) if self._loops else int
        self._blocks: Slots[jax.Array | int] = Slots(self._slot_limit, make)
        self._stagings = Slots(self._slot_limit, self._make_staging)
        self._reading: deque[tuple[jax.Array, Staging]] = deque()
        """Buffers that the device reads, oldest first, with what is ready when it has."""
        self._lock = threading.Lock()

    # What follows is all that differs where the pool is split over devices.

    def _zeros(self) -> jax.Array:
        if self.layout is None:
            return jnp.zeros(self.shape.array, self.dtype, device=self._device)
        return jax.jit(lambda: jnp.zeros(self.shape.array, self.dtype), out_shardings=self.layout)()

    def _make_batch(self, pages: int, dtype: jnp.dtype) -> jax.Array:
        return jnp.zeros((pages, *self.array.shape[1:]), dtype, device=self._device)

    def _make_staging(self) -> Staging:
        return Staging((self.batch_pages, *self.array.shape[1:]), np.dtype(self._wire))

    def _programs(self) -> tuple[Any, Any]:
        """Gather and scatter, jitted."""
        if self._loops:
            gather = jax.jit(gather_loop, donate_argnums=1)
        else:
            gather = jax.jit(partial(gather_rows, wire=self._wire))
        scatter = scatter_loop if self._scatter_loops else scatter_rows
        return gather, jax.jit(scatter, donate_argnums=0, out_shardings=(self.layout, None))

    def _start_copy(self, array: jax.Array) -> None:
        array.copy_to_host_async()

    def _read(self, array: jax.Array, count: int) -> np.ndarray:
        return np.asarray(array)[:count]

    def _put(self, staging: Staging, count: int) -> jax.Array:
        return jax.device_put(staging.values[:count], self._device)


def _is_ready(array: Any) -> bool:
    # Part of jax's arrays, but not of the class that is declared to type checkers.
    return array.is_ready()
