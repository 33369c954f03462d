"""Defaults that differ by platform, and how much memory there is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax

from ..pallas_kernels.kernels import Target
from .config import ConfigError


@dataclass(frozen=True, slots=True)
class Platform:
    """What suits a kind of device when the config does not say."""

    dtype: str
    """Of weights."""
    activations: str | None
    """Dtype of activations; None = that of the weights."""
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    shared_step_tokens: int | None
    """See `plan.Limits`."""
    pool_share: float
    """Part of the memory (`device_memory`) that the page pool takes."""
    host_times: float
    """Size of the host pool in device pools, where the config leaves it to us and host memory allows."""
    stacked: bool
    """Parameters of all layers in stacked arrays; else one set of arrays per layer (see `models.transformer`)."""


PLATFORMS = {
    # XLA's bf16 products and updates are 5-10x slower than f32 here; larger chunks only delay running decodes.
    "cpu": Platform("f32", "f32", 16, 64, 512, 128, 0.125, 1.0, stacked=False),
    "default": Platform("bf16", None, 16, 256, 2048, None, 0.85, 8.0, stacked=True),
}


_TPU_GENERATIONS = {
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v6 lite": "v6e",
    "v6e": "v6e",
    "v5p": "v5p",
    "v5": "v5p",
    "7x": "tpu7x",
}
"""What a TPU's `device_kind` holds (the first that matches counts) -> the generation's usual name."""


def device_target() -> Target:
    """What kernels are chosen by, of the first device."""
    device = jax.local_devices()[0]
    if device.platform == "tpu":
        kind = device.device_kind.lower()
        return Target("tpu", next((name for part, name in _TPU_GENERATIONS.items() if part in kind), kind))
    return Target(device.platform, str(getattr(device, "compute_capability", "")))


def compiler_options(target: Target) -> dict[str, str]:
    """What XLA is to be told when it compiles a step."""
    if target.generation == "tpu7x":
        # It would read 16-bit weights in tiles of 16 rows, but take them in tiles of 8: each step then copies all layers'.
        return {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}
    return {}


def weight_form(quantization: str, platform: str) -> str:
    """The form of quantised weights on a platform, as the loader calls it; `ConfigError` for one that is of no use there.

    Forms are named in the keys of cached pages: platforms whose weights differ share no KV.
    """
    if platform == "cpu":
        if quantization in ("fp8", "int4"):
            raise ConfigError(
                f"quantization: {quantization} is for TPUs and GPUs. On a CPU every step would unpack the weights anew, which"
                " takes ten times as long as reading them in f32: use int8"
            )
        return quantization
    # Without qwix, int8 is what a CPU has, unpacked by XLA.
    return "int8-rows" if quantization == "int8" and find_spec("qwix") else quantization


def device_memory(
    devices: Sequence[Any] | None = None, *, copies: int = 1, to_come: int = 0
) -> tuple[int, int]:
    """Bytes on each of these devices of this process (the first one, if none are given): a figure that is the same at
    every start, for defaults, and what is available now.

    An accelerator is ours alone, so both are what the weights leave of it, where they leave least. On CPU the steady
    figure is all of the memory, of which each device has its part, and other copies of the model as much; these have
    `to_come` bytes of parameters still to load.
    """
    devices = devices or jax.local_devices()[:1]
    stats = [device.memory_stats() for device in devices]
    if all(one and "bytes_limit" in one for one in stats):
        left = min(one["bytes_limit"] - one.get("bytes_in_use", 0) for one in stats)
        return left, left
    total, available = host_memory()
    shares = len(devices) * copies
    return total // shares, max(available - to_come, 0) // shares


def host_memory() -> tuple[int, int]:
    """Bytes of the machine's memory: all of it, and what is available now."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return total, int(line.split()[1]) * 1024
    return total, os.sysconf("SC_AVPHYS_PAGES") * page


def pool_pages(wanted_bytes: int, available_bytes: int, page_bytes: int) -> int:
    """Pages of a pool whose size was left to us: what is wanted, but at most 90 % of what is available.

    In the second case a power of two, since the number of pages is part of every compiled program, and the memory that
    is free differs a little at every start: programs that an earlier start compiled should fit.
    """
    pages = wanted_bytes // page_bytes
    most = int(available_bytes * 0.9) // page_bytes
    return pages if pages <= most else 1 << (max(most, 1).bit_length() - 1)
