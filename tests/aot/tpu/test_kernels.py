"""Every shape that a backend says it serves compiles: vector and scalar memory suffice."""

from __future__ import annotations

import pytest

from aot.cases import SHAPES, check_kernels, check_page_copies, shape_id
from aot.results import Report
from aot.tpu.chips import chip
from tierax.pallas_kernels.kernels import AttentionShape
from tierax.pallas_kernels.tpu.blocks import TUNING


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("name", TUNING)
def test_kernels(name: str, shape: AttentionShape, report: Report) -> None:
    check_kernels(chip(name), shape, "tpu", report)


@pytest.mark.parametrize("shape", SHAPES[::5] + SHAPES[3::5], ids=shape_id)
def test_copies_of_pages(shape: AttentionShape) -> None:
    check_page_copies(chip("v6e"), shape)
