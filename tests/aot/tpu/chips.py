"""TPUs as the compiler knows them."""

from __future__ import annotations

from functools import cache

from jax.experimental.topologies import get_topology_desc

from aot.programs import Chip
from tierax.pallas_kernels.kernels import Target

_CHIPS = {
    "v5e": ("v5e:2x2", 15.75),
    "v5p": ("v5p:2x2x1", 95.74),
    "v6e": ("v6e:2x2", 31.25),
    "tpu7x": ("tpu7x:2x2x1", 94.75),
}
"""Topology, and GiB of HBM that the compiler leaves to a program (of a tpu7x chip's two devices, each has half)."""


@cache
def chip(name: str) -> Chip:
    """Chips of one host."""
    topology, memory = _CHIPS[name]
    devices = get_topology_desc(platform="tpu", topology_name=topology).devices
    return Chip(name, Target("tpu", name), int(memory * 2**30), devices)


@cache
def slice_of(topology: str) -> Chip:
    """All chips of a slice, as `v6e:2x4`; `1x1` is the first of several."""
    generation, _, shape = topology.partition(":")
    one = chip(generation)
    if shape == "1x1":
        return one._replace(name=topology, devices=one.devices[:1])
    devices = get_topology_desc(platform="tpu", topology_name=topology).devices
    return one._replace(name=topology, devices=devices)
