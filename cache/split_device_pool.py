"""L1 over several devices: each holds some of the KV heads of every page. Pages go down whole, and come up in parts."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..pallas_kernels.page_copies import gather_loop, gather_rows, scatter_loop, scatter_rows
from ..pallas_kernels.pages import PoolShape
from .device_pool import STAGING_BYTES, DevicePool, Staging
from .head_order import HeadOrder
from .host_pool import aligned_rows


class Split(NamedTuple):
    """How a pool lies on its devices."""

    sharding: NamedSharding
    """Of the array: some axis behind the first three is split over all devices of the mesh, in their order."""
    array: tuple[int, ...]
    """Its shape over all devices, `[pages + 1, layers, page_size, ...]`."""
    order: HeadOrder


class SplitDevicePool(DevicePool):
    """A `DevicePool` whose gathers and scatters run on every device for its own heads, without a word between them.

    Its pages, and so `page_bytes`, are those of the tiers below: the heads of this process, each once.
    """

    def __init__(
        self,
        shape: PoolShape,
        dtype: jnp.dtype,
        split: Split,
        *,
        layout: Format | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """shape: with the KV heads of this process."""
        self._split = split
        mesh = split.sharding.mesh
        assert isinstance(mesh, Mesh)
        self._devices = list(mesh.devices.flat)
        super().__init__(shape, dtype, layout=layout, staging_bytes=staging_bytes)

    @property
    def placement(self) -> Any:
        return self.layout or self._split.sharding

    def _zeros(self) -> jax.Array:
        return jax.jit(lambda: jnp.zeros(self._split.array, self.dtype), out_shardings=self.placement)()

    def _make_batch(self, pages: int, dtype: jnp.dtype) -> jax.Array:
        shape = (pages, *self._split.array[1:])
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=self._split.sharding)()

    def _make_staging(self) -> Staging:
        shape = self.shape
        page = (shape.layers, shape.page_size, shape.kv_heads, shape.row_width)
        local = self._split.sharding.shard_shape(self._split.array)[1:]
        return _PartStaging((self.batch_pages, *page), local, np.dtype(self._wire), self._split.order)

    def _programs(self) -> tuple[Any, Any]:
        split = self._split.sharding.spec
        whole = PartitionSpec()
        run = partial(jax.shard_map, mesh=self._split.sharding.mesh, check_vma=False)
        if self._loops:
            loop = run(gather_loop, in_specs=(split, split, whole, whole), out_specs=split)
            gather = jax.jit(loop, donate_argnums=1)
        else:
            form = partial(gather_rows, wire=self._wire)
            gather = jax.jit(run(form, in_specs=(split, whole), out_specs=split))
        scatter, more = (scatter_loop, (whole,)) if self._scatter_loops else (scatter_rows, ())
        scatter = run(scatter, in_specs=(split, split, whole, *more), out_specs=(split, whole))
        return gather, jax.jit(scatter, donate_argnums=0, out_shardings=(self.placement, None))

    def _start_copy(self, array: jax.Array) -> None:
        for block in self._blocks_of(array).values():
            block.copy_to_host_async()

    def _read(self, array: jax.Array, count: int) -> np.ndarray:
        shape = self.shape
        page = (shape.layers, shape.page_size, shape.kv_heads, shape.row_width)
        pages = np.empty((count, *page), array.dtype)
        self._split.order.join({i: np.asarray(block) for i, block in self._blocks_of(array).items()}, pages)
        return pages

    def _put(self, staging: Staging, count: int) -> jax.Array:
        assert isinstance(staging, _PartStaging)
        parts = [jax.device_put(part, self._devices[device]) for device, part in staging.cut(count).items()]
        shape = (count, *self._split.array[1:])
        return jax.make_array_from_single_device_arrays(shape, self._split.sharding, parts)

    def _blocks_of(self, array: jax.Array) -> dict[int, jax.Array]:
        """By device, what is wanted of gathered pages: every head once."""
        wanted = {self._devices[held.device]: held.device for held in self._split.order.sources}
        return {
            wanted[shard.device]: shard.data for shard in array.addressable_shards if shard.device in wanted
        }


class _PartStaging(Staging):
    """Pages as the host has them, and behind that a block for each device, with its heads in their places."""

    def __init__(
        self, shape: tuple[int, ...], local: tuple[int, ...], dtype: np.dtype, order: HeadOrder
    ) -> None:
        super().__init__(shape, dtype)
        count = shape[0]
        nbytes = count * int(np.prod(local)) * dtype.itemsize
        self._order = order
        self._parts: dict[int, np.ndarray] = {}
        for held in order.held:
            raw = aligned_rows(1, nbytes)
            # Places without a head are read as well: what lies there must be numbers.
            raw[:] = 0
            self._parts[held.device] = raw.reshape(-1).view(dtype).reshape(count, *local)

    def cut(self, count: int) -> dict[int, np.ndarray]:
        """The first `count` pages as the blocks of the devices of this process, in their order."""
        for held in self._order.held:
            self._order.part(self.values[:count], held, self._parts[held.device])
        return {device: part[:count] for device, part in self._parts.items()}
