"""Whole steps compiled for NVIDIA GPUs: in place, and within memory."""

from __future__ import annotations

import pytest

from aot.cases import check_step
from aot.gpu.chips import chip
from aot.models import MODELS
from aot.programs import PHASES, Step, compile_step, default_backend
from aot.results import Report

KERNELS = {"H100": "mosaic-gpu", "A100": "triton"}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", KERNELS)
def test_step_on_one_gpu(name: str, model: str, phase: str, report: Report) -> None:
    check_step(chip(name), Step(model, phase, backend=KERNELS[name]), report)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", KERNELS)
def test_these_kernels_are_the_default(name: str, model: str, tp: int) -> None:
    assert default_backend(chip(name), Step(model, "decode", tp)) == KERNELS[name]


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("model", ["Qwen3-8B", "SmolLM2-135M"])
def test_step_with_other_kernels(model: str, backend: str, report: Report) -> None:
    check_step(chip("H100"), Step(model, "mixed", backend=backend), report)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", KERNELS)
def test_step_on_four_gpus(name: str, model: str, report: Report) -> None:
    check_step(chip(name), Step(model, "decode", tp=4, backend=KERNELS[name]), report)


def test_temporaries_do_not_grow_with_the_pool() -> None:
    small, large = (
        compile_step(chip("H100"), Step("Qwen3-8B", "decode", pool_share=share)) for share in (0.4, 0.8)
    )
    assert large.pool_bytes > 1.9 * small.pool_bytes
    assert large.temp_bytes < 1.01 * small.temp_bytes
