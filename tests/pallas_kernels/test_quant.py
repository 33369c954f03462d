"""8-bit KV: its codes against ml_dtypes, its rows at the edges of f32, and attention over a pool of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tierax.pallas_kernels import reference, xla
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.pages import PoolShape, gather_layer, write_kv
from tierax.pallas_kernels.quant import LARGEST, SCALE_BYTES, decode, dequantize_kv, encode, quantize_kv

CODES = np.arange(256, dtype=np.uint8)
VALUES = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
NAN_CODES = (0x7F, 0xFF)
FINITE = np.isfinite(VALUES)
HEAD_DIM = 16

_encode, _decode, _dequantize = jax.jit(encode), jax.jit(decode), jax.jit(dequantize_kv)
_quantize = jax.jit(quantize_kv)


def e4m3(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def through(k: np.ndarray, v: np.ndarray | None = None) -> np.ndarray:
    """What `[T, heads, HEAD_DIM]` reads as once stored; K only, unless V is given."""
    read = np.asarray(_dequantize(_quantize(k, k if v is None else v)))
    return read[..., :HEAD_DIM] if v is None else read


def test_every_code_decodes_as_ml_dtypes_has_it() -> None:
    decoded = np.asarray(_decode(CODES))
    np.testing.assert_array_equal(decoded[FINITE], VALUES[FINITE])
    assert np.isfinite(decoded).all(), (
        "stale bytes can be anything, and 0 * NaN would reach who may not see them"
    )
    assert tuple(CODES[~FINITE]) == NAN_CODES


def test_codes_round_to_nearest_with_ties_to_even_and_saturate() -> None:
    magnitudes = np.unique(np.abs(VALUES[FINITE]))
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [
            magnitudes,
            ties,
            np.nextafter(ties, np.float32(0)),
            np.nextafter(ties, np.float32(np.inf)),
            np.array([448.1, 463.9, 464, 480, 1e30, np.inf, 2.0**-10, 2.0**-126, 1e-40, 0], np.float32),
            np.float32(2) ** rng.uniform(-12, 10, 20_000).astype(np.float32),
        ]
    ).astype(np.float32)
    for sign in (1, -1):
        codes = np.asarray(_encode(sign * values))
        expected = e4m3(sign * values)
        differing = codes != expected
        assert not differing.any(), (sign * values[differing], codes[differing], expected[differing])


def test_decoding_and_encoding_again_changes_nothing() -> None:
    np.testing.assert_array_equal(np.asarray(_encode(_decode(CODES[FINITE]))), CODES[FINITE])


def test_a_row_is_accurate_to_half_a_step_of_its_code() -> None:
    rng = np.random.default_rng(1)
    for size in (1e-20, 1e-3, 1.0, 37.5, 1e20):
        k, v = size * rng.standard_normal((2, 50, 3, HEAD_DIM)).astype(np.float32)
        read = through(k, 100 * v)
        for values, stored in ((k, read[..., :HEAD_DIM]), (100 * v, read[..., HEAD_DIM:])):
            smallest = np.abs(values).max(-1, keepdims=True) / LARGEST * 2.0**-9
            assert (np.abs(stored - values) <= np.maximum(np.abs(values) * 2.0**-4, smallest)).all()
            top = np.abs(values).max(-1)
            np.testing.assert_allclose(np.abs(stored).max(-1), top, rtol=2.0**-8)


def test_a_row_has_its_scale_to_itself() -> None:
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 6, 2, HEAD_DIM)).astype(np.float32)
    rows = np.asarray(_quantize(k, v))
    assert rows.shape == (6, 2, 2 * HEAD_DIM + SCALE_BYTES)
    assert rows.dtype == np.uint8
    louder = k.copy()
    louder[3, 1] *= 1000
    changed = (np.asarray(_quantize(louder, v)) != rows).any(-1)
    np.testing.assert_array_equal(np.argwhere(changed), [[3, 1]])


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 1e-30, 1e30, 2.0**127, 3.4e38, np.inf, -np.inf]
)
def test_extremes_are_finite(value: float) -> None:
    mixed = np.array([[[0.5, -value, value, 0, 1e-40, *[value] * (HEAD_DIM - 5)]]], np.float32)
    for k in (np.full((1, 1, HEAD_DIM), value, np.float32), mixed):
        stored = through(k)
        assert np.isfinite(stored).all()
        assert (np.sign(stored) * np.sign(k) >= 0).all()
        if 1e-29 < abs(value) < 2.0**127:
            np.testing.assert_allclose(stored[..., 2], k[..., 2], rtol=2.0**-8)
    assert (through(np.zeros((2, 3, HEAD_DIM), np.float32)) == 0).all()


def test_a_nan_stays_where_it_is() -> None:
    k = np.ones((2, 2, HEAD_DIM), np.float32)
    k[0, 1, 5] = np.nan
    stored = through(k, np.ones_like(k))
    assert np.isnan(stored[0, 1, :HEAD_DIM]).all()
    assert np.isfinite(stored[0, 1, HEAD_DIM:]).all()
    assert np.isfinite(np.delete(stored.reshape(4, -1), 1, axis=0)).all()


def test_bf16_input_is_quantised_as_its_f32_values() -> None:
    k = jnp.asarray(np.random.default_rng(3).standard_normal((4, 2, HEAD_DIM)), jnp.bfloat16)
    np.testing.assert_array_equal(_quantize(k, k), _quantize(k.astype(jnp.float32), k.astype(jnp.float32)))


# --- in a pool

SHAPE = PoolShape(pages=40, layers=2, page_size=4, kv_heads=2, head_dim=HEAD_DIM, quantized=True)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_what_is_written_is_gathered_and_nothing_else_changes(tokens: int, kv_heads: int) -> None:
    shape = SHAPE._replace(kv_heads=kv_heads)
    rng = np.random.default_rng(tokens)
    before = rng.integers(0, 256, shape.array, np.uint8)
    slots = rng.permutation(shape.pages * shape.page_size)[:tokens].astype(np.int32)
    k, v = rng.standard_normal((2, tokens, kv_heads, HEAD_DIM)).astype(np.float32)
    pool = jnp.array(before)
    written = jax.jit(write_kv, donate_argnums=0)(pool, k, v, slots, jnp.int32(1))
    assert pool.is_deleted(), "it is updated in place"
    after = np.array(written)
    expected = before.copy()
    rows = np.asarray(_quantize(k, v))
    expected[slots // 4, 1, slots % 4] = rows if kv_heads > 1 else rows[:, 0]
    np.testing.assert_array_equal(after[: shape.pages], expected[: shape.pages])

    read = jax.jit(gather_layer)(jnp.asarray(after), slots // 4, 1)
    assert read.dtype == jnp.float32
    read = np.asarray(read).reshape(tokens, 4, kv_heads, 2 * HEAD_DIM)[np.arange(tokens), slots % 4]
    np.testing.assert_array_equal(read, through(k, v))


def test_attention_sees_the_stored_values() -> None:
    """Both paths over a pool of codes against the same paths over an f32 pool of what those codes say."""
    rng = np.random.default_rng(4)
    counts, lengths = [7, 4, 1, 1], [20, 4, 30, 9]
    table = np.zeros((4, 8), np.int32)
    free = rng.permutation(SHAPE.pages)
    codes = jnp.asarray(rng.integers(0, 256, SHAPE.array, np.uint8)).at[..., -SCALE_BYTES:].set(0x3F)
    write = jax.jit(write_kv)
    for row, length in enumerate(lengths):
        used, free = np.split(free, [-(-length // 4)])
        table[row, : len(used)] = used
        k, v = rng.standard_normal((2, length, 2, HEAD_DIM)).astype(np.float32)
        positions = np.arange(length)
        codes = write(codes, k, v, (used[positions // 4] * 4 + positions % 4).astype(np.int32), 1)
    values = _dequantize(codes)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    batch = RaggedBatch(starts, np.int32(lengths), table, np.int32(2), np.int32(4))  # pyright: ignore[reportArgumentType]
    q = rng.standard_normal((13, 6, HEAD_DIM)).astype(np.float32)
    fast = jax.jit(xla.attend, static_argnums=2)
    plain = jax.jit(lambda q, pool: reference.attend(q, pool, 1, batch))
    expected = np.asarray(plain(q, values))
    np.testing.assert_allclose(plain(q, codes), expected, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(fast(q, codes, 1, batch), expected, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(fast(q, values, 1, batch), expected, atol=2e-5, rtol=2e-5)
