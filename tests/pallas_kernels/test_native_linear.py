"""The native product against float64, and bit by bit where it promises bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierax.pallas_kernels import linear as in_xla
from tierax.pallas_kernels.cpu import backend
from tierax.pallas_kernels.cpu.library import library
from tierax.pallas_kernels.cpu.linear import MOST_ROWS, exact_linear, linear
from tierax.pallas_kernels.kernels import AttentionShape, Target
from tierax.pallas_kernels.linear import GROUP, QuantizedMatrix, Weight, dequantize, quantize

native = pytest.mark.skipif(bool(library().absence), reason=library().absence)
KINDS = ("f32", "bf16", "int8")

multiply = jax.jit(exact_linear)


def make_weight(rng: np.random.Generator, kind: str, rows: int, columns: int) -> Weight:
    if kind == "int8":
        codes = rng.integers(-127, 128, (rows, columns), np.int8)
        scales = rng.uniform(0.001, 1.0, (rows, -(-columns // GROUP))).astype(np.float32)
        return QuantizedMatrix(*map(jnp.asarray, (codes, scales)))
    matrix = rng.standard_normal((rows, columns)).astype(np.float32)
    return jnp.asarray(matrix.astype(jnp.bfloat16) if kind == "bf16" else matrix)


def as_float64(weight: Weight) -> np.ndarray:
    if not isinstance(weight, QuantizedMatrix):
        return np.asarray(weight).astype(np.float64)
    codes, scales = map(np.asarray, weight)
    return codes * scales.astype(np.float64)[:, np.arange(codes.shape[1]) // GROUP]


def assert_close(y: jax.Array, x: np.ndarray, weight: Weight) -> None:
    """Each of a lane's additions loses at most 2**-24 of the sum so far: lanes are at least four."""
    matrix = as_float64(weight)
    bound = (np.abs(x).astype(np.float64) @ np.abs(matrix).T) * 2.0**-24 * (x.shape[1] / 4 + 8)
    assert (np.abs(np.asarray(y) - x.astype(np.float64) @ matrix.T) <= bound).all()


@native
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 67),
    outputs=st.integers(1, 90),
    inputs=st.one_of(st.integers(1, 40), st.integers(41, 400)),
    seed=st.integers(0, 99),
)
@example(rows=1, outputs=1, inputs=1, seed=0)
@example(rows=67, outputs=37, inputs=131, seed=0)
def test_equals_float64(kind: str, rows: int, outputs: int, inputs: int, seed: int) -> None:
    check_against_float64(kind, rows, outputs, inputs, seed)


@native
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_equals_float64_for_all_counts_of_rows(kind: str) -> None:
    for rows in range(1, 68):
        for outputs, inputs in ((5, 29), (31, 65), (96, 576)):
            check_against_float64(kind, rows, outputs, inputs, rows)


def check_against_float64(kind: str, rows: int, outputs: int, inputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    weight = make_weight(rng, kind, outputs, inputs)
    y = multiply(x, weight)
    assert y.shape == (rows, outputs)
    assert_close(y, x, weight)


@native
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_to_the_bit_whatever_stands_beside_it(kind: str) -> None:
    """Columns and rows enough for several tasks, so that threads take part in any order."""
    rng = np.random.default_rng(7)
    weight = make_weight(rng, kind, 800, 203)
    x = rng.standard_normal((67, 203)).astype(np.float32)
    alone = np.concatenate([multiply(x[i : i + 1], weight) for i in range(67)])
    for rows in (2, 3, 5, 8, 31, 67):
        np.testing.assert_array_equal(multiply(x[:rows], weight), alone[:rows])
        np.testing.assert_array_equal(multiply(x[-rows:], weight), alone[-rows:])


@native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [2048, 11000])
def test_many_rows_meet_blocks_of_the_weight(kind: str, inputs: int) -> None:
    """Several blocks with a last one that is not full; and rows so long that not one tile of f32 makes a block."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((150, inputs)).astype(np.float32)
    weight = make_weight(rng, kind, 130, inputs)
    y = multiply(x, weight)
    assert_close(y, x, weight)
    np.testing.assert_array_equal(y[149:], multiply(x[149:], weight))


@native
def test_extreme_numbers_go_through() -> None:
    x = np.zeros((2, 9), np.float32)
    x[0, 8], x[1, 0] = np.inf, np.nan
    weight = np.ones((3, 9), np.float32)
    y = np.asarray(multiply(x, weight))
    assert np.isposinf(y[0]).all()
    assert np.isnan(y[1]).all()


@native
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_left_to_xla_unless_a_row_must_not_depend_on_them(kind: str) -> None:
    weight = make_weight(np.random.default_rng(0), kind, 4, 8)
    most = MOST_ROWS[jax.tree.leaves(weight)[0].dtype.name]
    x = jnp.ones((most + 1, 8))
    assert "ffi_call" in str(jax.make_jaxpr(linear)(x[:-1], weight))
    assert "ffi_call" not in str(jax.make_jaxpr(linear)(x, weight))
    assert "ffi_call" in str(jax.make_jaxpr(exact_linear)(x, weight))


@native
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "fp8"])
def test_where_kv_is_rounded_no_row_depends_on_how_many_there_are(kv_dtype: str) -> None:
    rng = np.random.default_rng(10)
    x = jnp.asarray(rng.standard_normal((MOST_ROWS["float32"] + 70, 203)), jnp.float32)
    weight = make_weight(rng, "f32", 300, 203)
    product = backend.kernels(Target("cpu"), AttentionShape(4, 2, 16, 16, "f32", kv_dtype)).linear
    many, few = jax.jit(product)(x, weight), jax.jit(product)(x[-3:], weight)
    np.testing.assert_allclose(many[-3:], few, rtol=1e-4, atol=1e-4)
    if kv_dtype != "f32":
        np.testing.assert_array_equal(many[-3:], few)


@native
def test_activations_of_bf16_come_back_as_bf16() -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((3, 64)).astype(jnp.bfloat16)
    weight = make_weight(rng, "bf16", 10, 64)
    y = multiply(x, weight)
    assert y.dtype == jnp.bfloat16
    exact = x.astype(np.float64) @ as_float64(weight).T
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), exact, rtol=0.01, atol=0.01)


@native
def test_shapes_that_do_not_fit_fail_the_call() -> None:
    call = jax.ffi.ffi_call("tierax_linear", jax.ShapeDtypeStruct((2, 3), jnp.float32))
    x, codes = jnp.ones((2, 8)), jnp.ones((3, 8), jnp.int8)
    for operands, message in (
        ((x, jnp.ones((3, 9))), r"must be \[\.\.\., n, k\]"),
        ((x, jnp.ones((4, 8))), r"must be \[m, n\]"),
        ((x, codes), "need scales"),
        ((x, codes, jnp.ones((3, 2))), "need scales"),
        ((x, jnp.ones((3, 8), jnp.int32)), "f32, bf16 or int8"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(*operands))


@pytest.mark.parametrize("columns", [GROUP - 3, 2 * GROUP, 3 * GROUP + 1])
def test_quantising_loses_at_most_half_a_step(columns: int) -> None:
    matrix = np.random.default_rng(columns).standard_normal((5, columns)).astype(np.float32)
    matrix[2] = 0
    quantized = quantize(jnp.asarray(matrix))
    assert (quantized.shape, quantized.ndim) == (matrix.shape, 2)
    codes, scales = map(np.asarray, quantized)
    for group in range(scales.shape[1]):
        part = np.s_[:, group * GROUP : (group + 1) * GROUP]
        largest = np.abs(matrix[part]).max(1)
        np.testing.assert_array_equal(np.abs(codes[part]).max(1), np.where(largest > 0, 127, 0))
        error = np.abs(codes[part] * scales[:, group, None].astype(np.float64) - matrix[part])
        assert (error <= largest[:, None] / 254 * (1 + 1e-5)).all()
    np.testing.assert_allclose(dequantize(quantized), as_float64(quantized), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_xla_takes_every_kind_of_weight(kind: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((6, 100)).astype(np.float32)
    weight = make_weight(rng, kind, 7, 100)
    assert_close(in_xla.linear(jnp.asarray(x), weight), x, weight)
