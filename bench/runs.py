"""Several runs of one measurement as one: medians, and how far they lie apart. And the machine that they ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine.version import __version__


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure, also those within dicts. What is no number, or missing in a run, is that of the first run."""
    return {key: _median([run.get(key) for run in runs]) for key in runs[0]}


def spreads(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same, as `[least, most]`; what is no number is left out."""
    found: dict[str, Any] = {}
    for key in runs[0]:
        values: list[Any] = [run.get(key) for run in runs]
        if all(isinstance(value, dict) for value in values):
            found[key] = spreads([value for value in values if isinstance(value, dict)])
        elif all(_is_number(value) for value in values):
            found[key] = [min(values, key=float), max(values, key=float)]
    return found


def _median(values: Sequence[Any]) -> Any:
    if all(isinstance(value, dict) for value in values):
        return medians(values)
    return statistics.median(values) if all(_is_number(value) for value in values) else values[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def machine() -> dict[str, Any]:
    """What a figure has to be read with: processor, cores, memory, load before, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {"tierax": __version__, "jax": _version("jax"), "numpy": _version("numpy")}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version is not None},
    }


def machine_line(found: dict[str, Any]) -> str:
    """For people, on one line."""
    names = ("python", "jax", "tierax")
    versions = ", ".join(f"{name} {found[name]}" for name in names if name in found)
    return (
        f"{found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB, {found['system']}; {versions};"
        f" load average {found['load']} before"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
