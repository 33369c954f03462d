"""`tierax doctor`: what an installation runs on, which kernels would serve a model here, with the reasons, and what to change."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from .doctor_checks import (
    GIB,
    Finding,
    check_accelerator,
    check_disk,
    check_libraries,
    check_memory,
    check_model,
    check_port,
    check_programs,
)
from .option import Parser

if TYPE_CHECKING:
    from ..engine.platform import Platform
    from ..models.source import ModelSource
    from ..pallas_kernels.kernels import AttentionShape, Target


def run(argv: list[str], clock: Callable[[], float] = perf_counter) -> int:
    """Prints the report, and what to change; returns 1 if nothing could be served as it is."""
    parser = Parser(
        "tierax doctor", "Tell what this installation runs on, which kernels serve, and what to change."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="the model that is to be served (default: demo, if it is installed)",
    )
    parser.add_argument(
        "--host-disk-cache-dir",
        metavar="DIR",
        help="try this place of a disk cache: may it be written, how fast is it",
    )
    args = parser.parse_args(argv)
    found = report(args.model, args.host_disk_cache_dir, clock)
    for finding in found:
        print(f"{finding.title:<16}{finding.text}")
    advice = [f for f in found if f.advice is not None]
    print(f"\nto change: {len(advice)}" if advice else "\nnothing to change")
    for number, finding in enumerate(advice, 1):
        print(
            f"{number}. {finding.title}{' (nothing works without)' if finding.broken else ''}: {finding.advice}"
        )
    return 1 if any(finding.broken for finding in found) else 0


def report(model: str | None, disk: str | None, clock: Callable[[], float]) -> list[Finding]:
    """Lines of the report. Raises `ModelError` for a model that was named and cannot be opened."""
    import jax

    from .. import __version__
    from ..engine.config import EngineConfig
    from ..engine.platform import PLATFORMS, device_target, host_memory
    from ..pallas_kernels import attention

    target = device_target()
    usual = PLATFORMS.get(target.platform, PLATFORMS["default"])
    found = [Finding("tierax", f"{__version__}, Python {platform.python_version()}, jax {jax.__version__}")]
    device = jax.local_devices()[0]
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    kind = f"{target.platform}: {jax.local_device_count()} x {device.device_kind}, {platform.machine()}"
    busy = (
        "others compute here too: speeds will be lower, and benchmarks say nothing"
        if load > cores / 2
        else None
    )
    found.append(Finding("device", f"{kind}; {cores} cores, load average {load:.1f}", busy))
    if (unseen := check_accelerator(target.platform)) is not None:
        found.append(unseen)

    source, absent = _source(model)
    shape = _shape(source, usual, target)
    kernels = attention.select(target, shape)
    found.append(Finding("kernels", f"{kernels.summary}, by --attention-backend auto"))
    for name, reason in attention.refusals(target, shape).items():
        fit = "in use" if name == kernels.name else "would serve"
        found.append(Finding("", f"{name}: {fit if reason is None else reason}"))
    found.append(_native_library(target))

    itemsize = 2 if usual.dtype in ("bf16", "bfloat16") else 4
    weights = 0 if source is None else source.config.num_parameters() * itemsize
    found.append(check_memory(*host_memory(), weights + GIB // 4 if target.platform == "cpu" else 0))
    found.append(check_model(source, itemsize) if source is not None else absent)
    if disk is not None:
        # Without a model: one of 8 billion parameters with 32 layers, 8 KV heads of 128 and 16 bits.
        per_token = 128 << 10 if source is None else source.config.kv_bytes_per_token(itemsize)
        found.append(check_disk(disk, per_token, clock))
    else:
        found.append(Finding("disk cache", "none named; --host-disk-cache-dir DIR tries one"))
    found.append(check_programs(EngineConfig(model_path=model or "demo").compile_cache_path()))
    found += [check_libraries(), check_port()]
    return found


def _source(model: str | None) -> tuple[ModelSource | None, Finding]:
    """The model, the demo if none is named; and what to say where that is not installed."""
    from ..models.errors import ModelError
    from ..models.source import resolve_model

    nothing = Finding("model", "none")
    try:
        return resolve_model(model or "demo"), nothing
    except ModelError as error:
        if model is not None:
            raise
        return None, Finding(
            "model", "none named, and no demo", f"name one (tierax doctor MODEL), or: {error}"
        )


def _shape(source: ModelSource | None, usual: Platform, target: Target) -> AttentionShape:
    from ..models.transformer import attention_shape
    from ..pallas_kernels.kernels import AttentionShape

    if source is None:
        return AttentionShape(32, 8, 128, usual.page_size, usual.dtype, usual.dtype)
    return attention_shape(source.config, usual.page_size, usual.dtype, usual.dtype)


def _native_library(target: Target) -> Finding:
    from ..pallas_kernels.cpu.library import PATH, library

    title = "native library"
    if target.platform != "cpu":
        return Finding(title, "for CPUs only")
    if absence := library().absence:
        advice = "install a C++17 compiler (g++ or clang++), then make clean serve, or pip install again: decoding is faster with it"
        return Finding(title, absence, advice)
    return Finding(title, f"{library().isa}, {PATH}")
