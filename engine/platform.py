"""Defaults that differ by platform, and how much memory there is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax


@dataclass(frozen=True, slots=True)
class Platform:
    """What suits a kind of device when the config does not say."""

    dtype: str
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pool_share: float
    """Part of the available memory that the page pool takes."""
    stacked: bool
    """Parameters of all layers in stacked arrays; else one set of arrays per layer (see `models.transformer`)."""


PLATFORMS = {
    # bf16 matrix products and updates are 5-10x slower than f32 here; larger chunks only delay running decodes.
    "cpu": Platform("f32", 16, 64, 512, 0.25, stacked=False),
    "default": Platform("bf16", 16, 256, 2048, 0.85, stacked=True),
}


def available_memory() -> int:
    """Bytes that can be allocated on the first device now; on CPU, what the system says is available."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
