"""Whole steps of models that are split over all chips of a slice: in place, and within memory."""

from __future__ import annotations

import pytest

from aot.cases import check_step
from aot.programs import PHASES, Step
from aot.results import Report
from aot.tpu.chips import slice_of

CASES = [
    ("v5e:2x2", "Qwen3-8B"),
    ("v5e:2x4", "Qwen3-30B-A3B"),
    ("v6e:2x2", "Qwen3-30B-A3B"),
    ("v6e:2x4", "Qwen3-30B-A3B"),
    ("v6e:2x4", "Llama-3.1-70B"),
    ("v6e:2x4", "Mixtral-8x7B"),
]


QUANTIZED = [
    ("v5e:1x1", "Qwen3-8B", "int8-rows"),
    ("v5e:1x1", "Qwen3-8B", "fp8"),
    ("v5e:2x4", "Llama-3.1-70B", "int8-rows"),
    ("v6e:2x2", "Qwen3-30B-A3B", "int8-rows"),
]
"""Fewer bits, where 16 of them do not fit, or leave little room."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("topology", "model"), CASES)
def test_step(topology: str, model: str, phase: str, report: Report) -> None:
    chips = slice_of(topology)
    check_step(chips, Step(model, phase, len(chips.devices), backend="tpu"), report)


@pytest.mark.parametrize(("topology", "model", "weights"), QUANTIZED)
def test_step_with_weights_of_few_bits(topology: str, model: str, weights: str, report: Report) -> None:
    chips = slice_of(topology)
    check_step(chips, Step(model, "decode", len(chips.devices), backend="tpu", weights=weights), report)
