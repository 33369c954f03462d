"""L1: the pages in device memory. The only module of the cache that knows jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..pallas_kernels.pages import PoolShape


class DevicePool:
    """One array of pages, donated to every step; whoever runs a step replaces `array` in the same statement."""

    def __init__(self, shape: PoolShape, dtype: jnp.dtype) -> None:
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        self.array: jax.Array = self._zeros()

    @property
    def page_bytes(self) -> int:
        return self.shape.page_elements * self.dtype.itemsize

    def reset(self) -> None:
        """A new, empty array, after a fault lost the old one."""
        if not self.array.is_deleted():
            self.array.delete()
        self.array = self._zeros()

    def _zeros(self) -> jax.Array:
        return jnp.zeros(self.shape.array, self.dtype)
