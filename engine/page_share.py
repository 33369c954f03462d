"""What of a page a host row has, and a record of the disk: shapes of the device pool, in the disk tier's words."""

from __future__ import annotations

from ..cache.device_pool import DevicePool
from ..cache.disk.record import PageLayout
from ..cache.disk.share import Share
from .placement import Placement


def page_share(pool: DevicePool, placement: Placement, process: int) -> Share:
    """This process' share of every page."""
    shape = pool.shape
    held = [range(shape.kv_heads)] if placement.shares is None else placement.held_heads
    heads, slots = max(process_heads.stop for process_heads in held), shape.layers * shape.page_size
    if shape.quantized:
        layout = PageLayout((slots * heads * shape.row_width,), "uint8")
    else:
        layout = PageLayout((shape.layers, shape.page_size, heads, shape.row_width), pool.dtype.name)
    return Share.of(layout, slots, held, process)
