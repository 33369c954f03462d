"""Every shape that a backend says it serves compiles: shared memory and registers suffice."""

from __future__ import annotations

import pytest

from aot.cases import SHAPES, check_kernels, check_page_copies, check_refusal, shape_id
from aot.gpu.chips import chip
from aot.results import Report
from tierax.pallas_kernels.gpu.blocks import DECODE, PREFILL
from tierax.pallas_kernels.gpu.triton_blocks import WIDEST, padded_width
from tierax.pallas_kernels.kernels import AttentionShape

BACKENDS = [("H100", "mosaic-gpu"), ("H100", "triton"), ("A100", "triton")]
NARROW = [
    AttentionShape(8, 2, head_dim, 16, dtype, dtype) for head_dim in (16, 32) for dtype in ("bf16", "f32")
]
"""Heads that only Triton's table has rows for."""


def _needs_bf16(backend: str, shape: AttentionShape) -> bool:
    return backend == "mosaic-gpu" and (shape.dtype, shape.kv_dtype) != ("bf16", "bf16")


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_kernels(name: str, backend: str, shape: AttentionShape, report: Report) -> None:
    if _needs_bf16(backend, shape):
        check_refusal(chip(name), shape, backend, "needs bf16", report)
    else:
        check_kernels(chip(name), shape, backend, report)


@pytest.mark.parametrize("shape", NARROW, ids=shape_id)
@pytest.mark.parametrize("name", ["H100", "A100"])
def test_narrow_heads(name: str, shape: AttentionShape, report: Report) -> None:
    check_kernels(chip(name), shape, "triton", report)


def test_no_row_of_a_block_table_is_left_out() -> None:
    compiled = {shape.head_dim for shape in SHAPES}
    assert compiled >= {*PREFILL, *DECODE}
    widths = {padded_width(head_dim) for head_dim in (*compiled, *(shape.head_dim for shape in NARROW))}
    assert widths == {1 << i for i in range(4, WIDEST.bit_length())}


@pytest.mark.parametrize("shape", SHAPES[::5], ids=shape_id)
def test_copies_of_pages(shape: AttentionShape) -> None:
    check_page_copies(chip("H100"), shape)
