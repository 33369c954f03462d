"""Bounds: what a step must read and compute, and what is said of a figure that beats them."""

from __future__ import annotations

from itertools import count

import pytest

from tierax.bench.bounds import Machine, ModelCost, impossible, measure_machine

MACHINE = Machine(read_bytes_s=1e9, read_method="fake", flop_s=1e9, read_buffer_bytes=1)
COST = ModelCost(
    weight_bytes=1_000_000,
    kv_bytes_per_token=1_000,
    matrix_parameters=100_000,
    head_parameters=50_000,
    attention_flops_per_pair=10,
)


def test_decode_reads_weights_once_and_every_sequence() -> None:
    assert COST.decode_bound(MACHINE, batch=1, context=0) == 1000
    assert COST.decode_bound(MACHINE, batch=1, context=1000) == 500
    assert COST.decode_bound(MACHINE, batch=4, context=250) == 2000


def test_prefill_computes_all_tokens_and_one_head() -> None:
    one = 1e9 / (2 * 100_000 + 2 * 50_000 + 10)
    assert COST.prefill_bound(MACHINE, 1) == pytest.approx(one)
    hundred = 100 * 1e9 / (100 * 2 * 100_000 + 2 * 50_000 + 10 * 5050)
    assert COST.prefill_bound(MACHINE, 100) == pytest.approx(hundred)


def test_a_figure_far_above_its_bound_is_impossible() -> None:
    assert impossible("decode", 100.0, 100.0) is None
    assert impossible("decode", 104.9, 100.0) is None
    message = impossible("decode 1 x 128", 106.0, 100.0)
    assert message is not None
    assert "decode 1 x 128: 106.0 is 1.06 times its bound of 100.0" in message
    assert impossible("decode", float("nan"), 100.0) is not None


def test_best_machine_is_taken_figure_by_figure() -> None:
    other = Machine(read_bytes_s=2e9, read_method="other", flop_s=5e8, read_buffer_bytes=2)
    for best in (Machine.best(MACHINE, other), Machine.best(other, MACHINE)):
        assert best == Machine(read_bytes_s=2e9, read_method="other", flop_s=1e9, read_buffer_bytes=2)


def test_the_machine_is_measured_with_the_clock_given() -> None:
    ticks = count()
    machine = measure_machine(lambda: float(next(ticks)), buffer_bytes=1 << 20, repeats=1)
    assert machine.read_bytes_s == 1 << 20
    assert machine.flop_s == 2 * 2048**3
    assert machine.read_method
