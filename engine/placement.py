"""Which devices an engine runs on, and how its model is split over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..cache.head_order import HeadOrder
from ..models.config import ModelConfig
from ..models.sharding import Shares
from ..models.transformer import Params
from .config import ConfigError

Device = Any
"""jax's class of devices, which is not declared to type checkers."""


@dataclass(frozen=True)
class Placement:
    """The devices of one engine: a single one, or those of a mesh that the model is split over."""

    shares: Shares | None
    """None: one device has all of the model."""
    device: Device | None = None
    """That one, unless it is the default device."""

    @cached_property
    def local(self) -> list[Device]:
        """Its devices in this process."""
        if self.shares is None:
            return [self.device or jax.local_devices()[0]]
        here = jax.process_index()
        return [device for device in self.shares.mesh.devices.flat if device.process_index == here]

    @property
    def everywhere(self) -> NamedSharding | None:
        """Of an array that each of several devices has all of."""
        return None if self.shares is None else NamedSharding(self.shares.mesh, PartitionSpec())

    @property
    def single(self) -> SingleDeviceSharding:
        """The first device of this process: memory is laid out on each as on that one."""
        return SingleDeviceSharding(self.local[0])

    def copied(self, params: Params) -> Params:
        """Parameters of an engine with as many devices, on those of this one."""
        if self.shares is None:
            return jax.device_put(params, self.single)
        mesh = self.shares.mesh
        return jax.device_put(
            params, jax.tree.map(lambda leaf: NamedSharding(mesh, leaf.sharding.spec), params)
        )

    def share_of(self, model: ModelConfig) -> ModelConfig:
        """The model that one device runs."""
        return model if self.shares is None else self.shares.share

    @cached_property
    def held_heads(self) -> list[range]:
        """KV heads of the model by process, each process' consecutive; `head_order` has those of this one."""
        assert self.shares is not None
        found: dict[int, list[int]] = {}
        for device, heads in zip(self.shares.mesh.devices.flat, self.shares.kv_heads.tolist(), strict=True):
            found.setdefault(device.process_index, []).extend(heads)
        none = self.shares.config.num_kv_heads
        real = [[head for head in heads if head < none] for _, heads in sorted(found.items())]
        return [range(min(heads, default=0), max(heads, default=-1) + 1) for heads in real]

    @cached_property
    def head_order(self) -> HeadOrder:
        """Where this process' KV heads are. Raises `ConfigError` if it has none."""
        assert self.shares is not None
        here = jax.process_index()
        devices = [i for i, d in enumerate(self.shares.mesh.devices.flat) if d.process_index == here]
        heads, own = self.shares.config.num_kv_heads, self.shares.kv_heads[devices]
        if not (own < heads).any():
            raise ConfigError(
                f"tp_size: the model's {heads} KV heads do not reach the devices of process {here};"
                " use fewer processes"
            )
        return HeadOrder(self.shares.kv_heads, heads, devices)


def place(tp_size: int, model: ModelConfig, devices: Sequence[Device] | None = None) -> Placement:
    """A model on `tp_size` of the devices (all of jax's, if none are given): as many of each process, one after the other.

    Raises `ConfigError` if there are not so many.
    """
    if tp_size == 1 and devices is None and jax.process_count() == 1:
        return Placement(None)
    if devices is None:
        devices = choose_devices(tp_size)
    return Placement(Shares(model, Mesh(np.array(devices), ("tp",))))


def place_replica(replica: int, replicas: int, tp_size: int, model: ModelConfig) -> Placement:
    """One of several copies of a model in this process, each on devices of its own.

    Raises `ConfigError` if there are not enough.
    """
    found = jax.local_devices()
    if replicas * tp_size > len(found):
        each = f" on {tp_size} devices each" if tp_size > 1 else ""
        raise ConfigError(
            f"dp_size: {replicas} copies{each} take {replicas * tp_size} devices, {_there_are(found)}"
        )
    own = found[replica * tp_size : (replica + 1) * tp_size]
    return Placement(None, own[0]) if tp_size == 1 else place(tp_size, model, own)


def choose_devices(count: int) -> list[Device]:
    """The first devices of every process, so many in all. Raises `ConfigError` if there are not."""
    processes = jax.process_count()
    found = jax.devices()
    if count > len(found):
        raise ConfigError(f"tp_size: {count} devices are asked for, {_there_are(found)}")
    if count % processes:
        raise ConfigError(f"tp_size: {count} devices cannot be shared out evenly among {processes} processes")
    each = count // processes
    chosen = [
        device
        for process in range(processes)
        for device in [device for device in found if device.process_index == process][:each]
    ]
    if len(chosen) < count:
        raise ConfigError(f"tp_size: {count} devices are {each} of each process, but some process has fewer")
    return chosen


def _there_are(found: Sequence[Device]) -> str:
    platform, count = found[0].platform, len(found)
    text = f"but jax finds {count} ({platform})"
    if platform != "cpu":
        return text
    return (
        f"{text}; the environment variable XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices of the"
        " CPU, to try things out"
    )
