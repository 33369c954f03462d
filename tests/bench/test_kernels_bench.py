"""The benchmark of attention: its forms compute the same thing, and its bound is that of the work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tierax.bench.bounds import Machine
from tierax.bench.kernels import Case, Result, all_layers, bound_ms, forms, main, make_inputs, measure
from tierax.pallas_kernels.kernels import AttentionShape

LAYERS = 2
SMALL = AttentionShape(4, 2, 8, 4, "f32", "f32")


@pytest.mark.parametrize("case", [Case(3, 1, 12), Case(1, 6, 5)], ids=str)
@pytest.mark.parametrize("kv_dtype", ["f32", pytest.param("fp8", marks=pytest.mark.slow)])
def test_all_forms_compute_the_same(case: Case, kv_dtype: str) -> None:
    shape = SMALL._replace(kv_dtype=kv_dtype)
    found = forms(shape)
    assert {"xla", "padded", "expanded"} <= set(found)
    q, pool, batch = make_inputs(shape, LAYERS, case)
    # Values that differ, so that who reads the wrong ones is found out.
    rng = np.random.default_rng(1)
    if kv_dtype == "fp8":
        drawn = rng.integers(0, 0x40, pool.shape)
        drawn[..., -4:] = 0x80, 0x3F, 0x80, 0x3F
    else:
        drawn = rng.standard_normal(pool.shape)
    pool = jnp.asarray(drawn.astype(pool.dtype))
    results = {name: all_layers(attend, LAYERS)(q, pool, batch) for name, attend in found.items()}
    expected = np.asarray(results.pop("xla"))
    assert np.ptp(expected) > 0.1
    for name, actual in results.items():
        np.testing.assert_allclose(actual, expected, atol=2e-5, err_msg=name)


def test_the_bound_counts_bytes_or_products() -> None:
    machine = Machine(read_bytes_s=1e6, read_method="", flop_s=1e9, read_buffer_bytes=0)
    # 3 rows of 10 positions, 2 heads of 8 numbers for K and as many for V.
    assert bound_ms(machine, SMALL, Case(3, 1, 9)) == pytest.approx(3 * 10 * 2 * 16 * 4 / 1e6 * 1e3)
    fp8 = SMALL._replace(kv_dtype="fp8")
    assert bound_ms(machine, fp8, Case(3, 1, 9)) == pytest.approx(3 * 10 * 2 * 20 / 1e6 * 1e3)
    # Queries that see 6 and 7 positions, two products of 8 numbers per head and pair.
    slow = replace(machine, flop_s=1e3)
    assert bound_ms(slow, SMALL, Case(1, 2, 5)) == pytest.approx(13 * 4 * 4 * 8 / 1e3 * 1e3)


def test_forms_take_turns() -> None:
    case = Case(1, 1, 3)
    ticks = iter([0, 5, 10, 11, 20, 27, 30, 32, 40, 49, 50, 53])
    chosen = {name: attend for name, attend in forms(SMALL).items() if name in ("xla", "padded")}
    times = measure(SMALL, LAYERS, case, chosen, 3, clock=lambda: float(next(ticks)))
    assert times == {"xla": [5000.0, 7000.0, 9000.0], "padded": [1000.0, 2000.0, 3000.0]}


def test_a_cell_has_the_median_and_how_far_the_runs_lie_apart() -> None:
    result = Result("1x4", "f32", 1.0, {"xla": 7.0, "padded": 2.0}, {"xla": (5.0, 9.0), "padded": (2.0, 2.0)})
    assert [result.show(form) for form in ("xla", "padded", "other")] == ["7.00 (5.00 - 9.00)", "2.00", ""]


@pytest.mark.parametrize("text", ["16", "0x5", "5x0", "x5", "a+b", "3x-4", "1+2+3"])
def test_a_case_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--cases", text])
    assert "neither ROWSxCONTEXT nor TOKENS+PREFIX" in capsys.readouterr().err


def test_cases_read_as_they_are_written() -> None:
    assert Case.parse("16x2048") == Case(16, 1, 2047)
    assert Case.parse("512+2048") == Case(1, 512, 2048)
    assert Case.parse("512+0") == Case(1, 512, 0)
    assert [str(Case.parse(text)) for text in ("16x2048", "512+2048")] == ["16x2048", "512+2048"]


def test_figures_as_json_and_as_a_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(read_bytes_s=1e12, read_method="none", flop_s=1e15, read_buffer_bytes=0)
    monkeypatch.setattr("tierax.bench.kernels.measure_machine", lambda clock: machine)
    arguments = (
        "--cases 2x9 4+3 --forms xla --repeats 1 --layers 1 --heads 2 --kv-heads 1 --head-dim 8 --json -"
    )
    assert main([*arguments.split(), "--plot", str(tmp_path / "kernels.svg")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["head_dim"] == 8
    assert [result["case"] for result in report["results"]] == ["2x9", "4+3"]
    assert all(list(result["forms_ms"]) == ["xla"] for result in report["results"])
    assert {"processor", "read_bytes_s"} <= report["machine"].keys(), "whose figures, and what bounds them"
    picture = (tmp_path / "kernels.svg").read_text()
    assert "2x9 f32" in picture
    assert "4+3 f32" in picture
    with pytest.raises(SystemExit):
        main([*arguments.split(), "--forms", "magic"])
    assert "no form 'magic' here: there are " in capsys.readouterr().err
