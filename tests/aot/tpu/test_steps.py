"""Whole steps compiled for TPUs: in place, and within memory."""

from __future__ import annotations

import pytest

from aot.cases import check_step
from aot.models import MODELS
from aot.programs import PHASES, Step, compile_step, default_backend
from aot.results import Report
from aot.tpu.chips import chip

CASES = [
    (name, model, tp)
    for name in ("v5e", "v6e", "tpu7x")
    for model in MODELS
    for tp in (1, 4)
    # The weights of an 8B model fill one v5e.
    if not (name == "v5e" and tp == 1 and model.endswith("8B"))
]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "model", "tp"), CASES)
def test_step(name: str, model: str, tp: int, phase: str, report: Report) -> None:
    check_step(chip(name), Step(model, phase, tp, backend="tpu"), report)


@pytest.mark.parametrize(("name", "model", "tp"), CASES)
def test_these_kernels_are_the_default(name: str, model: str, tp: int) -> None:
    assert default_backend(chip(name), Step(model, "decode", tp)) == "tpu"


@pytest.mark.parametrize("model", ["Qwen3-8B", "SmolLM2-135M"])
def test_step_with_8_bit_kv(model: str, report: Report) -> None:
    check_step(chip("v6e"), Step(model, "mixed", kv="fp8", backend="tpu"), report)


@pytest.mark.parametrize("model", ["Qwen3-8B", "SmolLM2-135M"])
def test_temporaries_do_not_grow_with_the_pool(model: str) -> None:
    small, large = (
        compile_step(chip("v6e"), Step(model, "decode", backend="tpu", pool_share=share))
        for share in (0.3, 0.6)
    )
    assert large.pool_bytes > 1.9 * small.pool_bytes
    assert large.temp_bytes < 1.01 * small.temp_bytes
