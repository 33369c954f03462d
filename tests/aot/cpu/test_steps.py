"""The demo model served on this machine's CPU, against reference values made with another implementation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from aot.results import Record, Report
from tierax import LLM, SamplingParams

GOLDEN = Path(__file__).parents[2] / "golden"
NEAR = 1e-3
"""Below this distance of the two likeliest tokens rounding decides."""


@pytest.mark.parametrize("backend", ["native", "xla"])
def test_step(backend: str, report: Report) -> None:
    ids = json.loads((GOLDEN / "demo.json").read_text(encoding="utf-8"))[14]["ids"]
    with np.load(GOLDEN / "demo.npz") as values:
        tokens, gaps = values["tokens"][14], values["gaps"][14]
    near = np.flatnonzero(gaps < NEAR)
    count = min(32, int(near[0]) if near.size else 32)
    assert count > 8
    with LLM(
        "demo",
        dtype="f32",
        attention_backend=backend,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        context_length=1024,
        skip_warmup=True,
    ) as llm:
        (output,) = llm.generate([ids], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
    assert output.token_ids == tokens[:count].tolist()
    for phase in ("decode", "mixed"):
        report(Record("CPU", backend, "SmolLM2-135M", phase, 1, "f32", "f32", 16, "run"))
