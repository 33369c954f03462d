"""Flags of the tiers below the device."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from ..engine.config import WRITE_POLICIES
from .option import Option, size

HIERARCHICAL_SIZE = "2x"
"""What --enable-hierarchical-cache alone stands for, as it does where it comes from."""


def _times(text: str) -> str:
    """`2` -> `2x`, the spelling of `host_cache_size`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0: so many times the device cache")
    return f"{value:.10g}x"


def _in_units_of(unit: int) -> Callable[[str], int]:
    """Reads `30` as so many units, and `30GiB` as what it says."""

    def convert(text: str) -> int:
        try:
            found = math.floor(float(text) * unit)
        except (ValueError, OverflowError):
            found = size(text)
        if found <= 0:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be above 0; --host-cache-size 0 is for no host cache"
            )
        return found

    return convert


def _prefetch_policy(text: str) -> str:
    """`timeout` alone is the one that the engine has by default."""
    return "timeout=300ms" if text == "timeout" else text


TIER_OPTIONS = (
    Option(
        "host_cache_size",
        ("--host-cache-size",),
        "host memory for KV: auto, bytes, 2GiB, 40%% of what is available, 2x the device cache, or 0 for none",
        metavar="SIZE",
    ),
    Option(
        "host_cache_size", ("--hicache-ratio",), "the same as so many times the device cache", _times, "X"
    ),
    Option(
        "host_cache_size", ("--hicache-size",), "the same in GB (or 30GiB)", _in_units_of(1000**3), "SIZE"
    ),
    Option(
        "host_cache_size",
        ("--kv-offloading-size",),
        "the same in GiB (or 30GB)",
        _in_units_of(1024**3),
        "SIZE",
    ),
    Option(
        "hierarchical",
        ("--enable-hierarchical-cache",),
        f"the same as --host-cache-size {HIERARCHICAL_SIZE}, unless another size is given",
        const=True,
    ),
    Option(
        "host_disk_cache_dir",
        ("--host-disk-cache-dir",),
        "where KV outlives the process: a directory, or s3://…, gs://…, file://…",
        metavar="DIR",
    ),
    Option("disk_cache_size", ("--disk-cache-size",), "most bytes that it takes (20GiB)", metavar="SIZE"),
    Option(
        "disk_free_space",
        ("--disk-free-space",),
        "bytes of its file system that stay free (1GiB)",
        metavar="SIZE",
    ),
    Option(
        "disk_cache_read_only", ("--disk-cache-read-only",), "read it, but write nothing to it", const=True
    ),
    Option(
        "disk_cache_refresh",
        ("--disk-cache-refresh",),
        "seconds between looks for what other processes have written to it (30); 0 = only at start",
        float,
        "S",
    ),
    Option(
        "disk_cache_shared",
        ("--disk-cache-shared",),
        "other servers write to the same disk cache, all of them with this flag",
        const=True,
    ),
    Option(
        "disk_cache_lease",
        ("--disk-cache-lease",),
        "seconds after which a server that shares it and is not heard of counts as dead (30); the same for all",
        float,
        "S",
    ),
    Option(
        "host_eviction_policy",
        ("--host-eviction-policy",),
        "which page leaves the host first (as --eviction-policy)",
        metavar="POLICY",
    ),
    Option(
        "disk_eviction_policy",
        ("--disk-eviction-policy",),
        "which page leaves the disk first (as --eviction-policy)",
        metavar="POLICY",
    ),
    Option(
        "write_policy",
        ("--write-policy", "--hicache-write-policy"),
        f"when KV goes down to the host: {', '.join(WRITE_POLICIES)}",
        metavar="POLICY",
    ),
    Option(
        "prefetch_policy",
        ("--prefetch-policy", "--prefill-priority", "--hicache-storage-prefetch-policy"),
        "how long a request waits for the disk: best_effort, wait_complete, timeout=300ms",
        _prefetch_policy,
        "POLICY",
    ),
    Option(
        "prefetch_max_wait", ("--prefetch-max-wait",), "seconds that bound every such wait (10)", float, "S"
    ),
    Option(
        "disable_prefetch",
        ("--disable-prefetch", "--disable-prefill-preemption"),
        "read from the disk only when a request's turn has come",
        const=True,
    ),
)
