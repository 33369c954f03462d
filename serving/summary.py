"""What `tierax serve` says of its cache when it is ready: how much each tier holds, and where."""

from __future__ import annotations

import re
from typing import Any

from ..engine.config import parse_size

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def cache_lines(engine: Any) -> list[str]:
    """A line for each tier; `engine` has the face of `Engine` that serving uses."""
    config, cache = engine.config, engine.cache
    if config.disable_radix_cache:
        return [f"  device   {_room(cache.num_pages, engine)}, nothing shared between requests"]
    lines = [f"  device   {_room(cache.num_pages, engine)}"]
    if cache.host.num_pages:
        lines.append(f"  host     {_room(cache.host.num_pages, engine)}")
    if config.host_disk_cache_dir is not None:
        # What stands before the host in a URL may be a password.
        place = re.sub(r"//[^/@]*@", "//***@", str(config.host_disk_cache_dir))
        note = ", read only" if config.disk_cache_read_only else ""
        lines.append(f"  disk     {place}, up to {_bytes(_size(config.disk_cache_size))}{note}")
    return lines


def _room(pages: int, engine: Any) -> str:
    tokens = pages * engine.cache.page_size
    each = "" if engine.config.dp_size == 1 else f" for each of {engine.config.dp_size} copies of the model"
    return f"{pages:,} pages, {tokens:,} tokens, {_bytes(pages * engine.page_bytes)}{each}"


def _size(size: Any) -> int:
    return size if isinstance(size, int) else parse_size(size)


def _bytes(size: float) -> str:
    for unit in UNITS[:-1]:
        if size < 1024:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size} B"
        size /= 1024
    return f"{size:.3g} {UNITS[-1]}"
