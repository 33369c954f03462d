"""What is compiled for every platform, and how an outcome is judged and told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aot.programs import Chip, Compiled, Step, compile_kernels, compile_page_copies, compile_step
from aot.results import Record, Report
from tierax.pallas_kernels import attention
from tierax.pallas_kernels.kernels import AttentionShape

SHAPES = tuple(
    AttentionShape(heads, kv_heads, head_dim, page_size, dtype, kv)
    for heads, kv_heads, head_dim in (
        (32, 8, 128),  # Qwen3-8B, Llama-3.1-8B
        (8, 2, 128),  # a quarter of them
        (9, 3, 64),  # SmolLM2-135M
        (3, 1, 64),  # its share on three or four devices
        (8, 1, 128),
        (32, 32, 80),
        (32, 32, 96),
        (16, 8, 256),
    )
    for page_size, dtype, kv in (
        (16, "bf16", "bf16"),
        (64, "bf16", "bf16"),
        (256, "bf16", "bf16"),
        (16, "bf16", "fp8"),
        (16, "f32", "f32"),
    )
)
"""Of kernels alone: every head size that any block table names, and every kind of pool."""
MOST_STEP_TEMP = 384 << 20
"""Bytes; a step's activations, and on GPUs a copy of one layer's largest matrix, whatever the pool's size."""
MOST_KERNEL_TEMP = 64 << 20


def shape_name(shape: AttentionShape) -> str:
    return f"{shape.heads}/{shape.kv_heads}x{shape.head_dim}"


def shape_id(value: object) -> str:
    """For names of tests."""
    if isinstance(value, AttentionShape):
        return f"{shape_name(value)}-page{value.page_size}-{value.dtype}-{value.kv_dtype}"
    return str(value)


def check_step(chip: Chip, step: Step, report: Report) -> Compiled:
    """Compiles a step, tells the outcome, and fails where it is not as it should be."""
    return _check(
        Record(
            chip.name,
            step.backend,
            step.model,
            step.phase,
            step.tp,
            step.weights,
            step.kv,
            step.page_size,
            "",
        ),
        lambda: compile_step(chip, step),
        chip.memory,
        MOST_STEP_TEMP,
        report,
    )


def check_kernels(chip: Chip, shape: AttentionShape, backend: str, report: Report) -> Compiled:
    """The same for kernels alone."""
    dtypes = shape.dtype, shape.kv_dtype
    return _check(
        Record(chip.name, backend, shape_name(shape), "kernels", 1, *dtypes, shape.page_size, ""),
        lambda: compile_kernels(chip, shape, backend),
        chip.memory,
        MOST_KERNEL_TEMP,
        report,
    )


def check_refusal(chip: Chip, shape: AttentionShape, backend: str, reason: str, report: Report) -> None:
    """Tells, and makes sure, that a backend says at start that it does not serve a shape."""
    with pytest.raises(ValueError, match=reason) as refusal:
        attention.select(chip.target, shape, backend)
    told = str(refusal.value).partition(": ")[2]
    dtypes = shape.dtype, shape.kv_dtype
    report(
        Record(
            chip.name, backend, shape_name(shape), "kernels", 1, *dtypes, shape.page_size, f"refused: {told}"
        )
    )


def check_page_copies(chip: Chip, shape: AttentionShape) -> None:
    """Pages go out of a pool and into it with no temporary that grows with it, and in place."""
    gather, scatter = compile_page_copies(chip, shape)
    for copy in (gather, scatter):
        assert copy.temp_bytes < copy.pool_bytes // 16
    assert scatter.alias_bytes >= scatter.pool_bytes


def _check(
    record: Record,
    compile: Callable[[], Compiled],
    memory: int,
    most_temp: int,
    report: Report,
) -> Compiled:
    try:
        compiled = compile()
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        report(record._replace(verdict=f"does not compile: {first_line[:200]}"))
        raise
    faults = compiled.faults(memory, most_temp)
    report(
        record._replace(
            backend=compiled.backend,
            verdict="; ".join(faults) or "compiled",
            pool_bytes=compiled.pool_bytes,
            alias_bytes=compiled.alias_bytes,
            temp_bytes=compiled.temp_bytes,
            peak_bytes=compiled.peak_bytes,
            seconds=compiled.seconds,
            pages=compiled.pages,
            weight_bytes=compiled.weight_bytes,
        )
    )
    assert not faults, faults
    return compiled
