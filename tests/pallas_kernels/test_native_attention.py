"""The native attention and KV write: against float64, bit by bit where they promise bits, and in place."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention_mixes import (
    LAYER,
    LAYERS,
    POISON,
    Mix,
    Shape,
    assert_close,
    make_mix,
    plain,
    random_mix,
)
from tierax.pallas_kernels import pages, reference
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.cpu.attention import attend, write_kv
from tierax.pallas_kernels.cpu.library import library
from tierax.pallas_kernels.pages import PoolShape
from tierax.pallas_kernels.quant import LARGEST, SCALE_BYTES, decode

pytestmark = pytest.mark.skipif(bool(library().absence), reason=library().absence)

KV_DTYPES = ("f32", "bf16", "fp8")
SHAPES = [
    Shape(24, 6, 8, 4, 4, 2, 16),
    Shape(24, 6, 400, 1, 6, 2, 8),
    Shape(40, 7, 40, 16, 3, 3, 32),
    Shape(33, 5, 40, 4, 8, 1, 16, 20.0),
    Shape(1, 1, 40, 32, 7, 1, 64),
    Shape(330, 3, 60, 16, 4, 2, 8),
    Shape(150, 5, 5, 256, 9, 3, 64),
    Shape(30, 4, 30, 17, 5, 1, 13),
    Shape(20, 3, 12, 16, 8, 4, 80, 5.0),
    Shape(12, 3, 12, 16, 6, 1, 256),
]
"""Groups of 1 to 8 query heads; head_dim with and without a tail; contexts of several blocks and segments."""


@partial(jax.jit, static_argnames=("soft_cap", "scale"))
def run(q, pool, layer, batch, window, soft_cap=0.0, scale=None) -> jax.Array:
    return attend(q, pool, layer, batch, window=window, soft_cap=soft_cap, scale=scale)


def stored(mix: Mix, kv_dtype: str) -> Mix:
    """The mix with its pool in that dtype, K and V as they read from there, and NaN where no row may see."""
    written = mix.pool != POISON
    head_dim = mix.pool.shape[-1] // 2
    if kv_dtype == "fp8":
        kv = np.where(written, mix.pool, 0).reshape(*mix.pool.shape[:-1], 2, head_dim)
        scales = (np.abs(kv).max(-1, keepdims=True) / LARGEST + 1e-30).astype(ml_dtypes.bfloat16)
        codes = np.clip(kv / scales.astype(np.float32), -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
        read = (codes.astype(np.float32) * scales.astype(np.float32)).reshape(mix.pool.shape)
        parts = [part.reshape(*kv.shape[:-2], -1).view(np.uint8) for part in (codes, scales)]
        pool = np.where(written[..., :1], np.concatenate(parts, axis=-1), np.uint8(0xFF))
    else:
        dtype = ml_dtypes.bfloat16 if kv_dtype == "bf16" else np.float32
        pool = np.where(written, mix.pool, np.nan).astype(dtype)
        read = pool.astype(np.float32)
    rows = []
    for row, k in enumerate(mix.k):
        page, slot = np.divmod(np.arange(len(k)), mix.pool.shape[2])
        rows.append(read[np.asarray(mix.batch.page_table)[row, page], LAYER, slot])
    pool = pool if pool.shape[-2] > 1 else pool[..., 0, :]
    return mix._replace(
        pool=pool, k=[kv[..., :head_dim] for kv in rows], v=[kv[..., head_dim:] for kv in rows]
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_plain_numpy_over_ragged_mixes(shape: Shape, kv_dtype: str) -> None:
    rng = np.random.default_rng(shape.tokens)
    for window in (0, 0, 1, 33, 200):
        mix = stored(random_mix(rng, shape), kv_dtype)
        actual = run(mix.q, mix.pool, LAYER, mix.batch, window, shape.soft_cap)
        assert_close(actual, mix, plain(mix, shape, window))
        assert np.isfinite(actual).all()


@pytest.mark.parametrize(
    ("counts", "contexts"),
    [
        ([300, 20, 1], [500, 0, 900]),
        ([257, 73], [0, 640]),
        ([256, 2, 1], [256, 510, 511]),
        ([1, 1, 1], [959, 0, 127]),
        ([1, 1, 1], [128, 511, 512]),
    ],
)
@pytest.mark.parametrize("window", [0, 1, 128, 600])
def test_across_blocks_and_segments(counts: list[int], contexts: list[int], window: int) -> None:
    shape = SHAPES[5]
    mix = stored(make_mix(np.random.default_rng(3), shape, counts, contexts), "f32")
    assert_close(run(mix.q, mix.pool, LAYER, mix.batch, window), mix, plain(mix, shape, window))


@settings(max_examples=40, deadline=None)
@given(
    page_size=st.integers(1, 40),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 96),
    window=st.sampled_from([0, 0, 1, 7, 130]),
    soft_cap=st.sampled_from([0.0, 3.0]),
    kv_dtype=st.sampled_from(KV_DTYPES),
    seed=st.integers(0, 99),
)
def test_equals_plain_numpy_in_any_shape(
    page_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int,
    soft_cap: float,
    kv_dtype: str,
    seed: int,
) -> None:
    shape = Shape(20, 4, -(-300 // page_size), page_size, kv_heads * group, kv_heads, head_dim, soft_cap)
    mix = stored(random_mix(np.random.default_rng(seed), shape), kv_dtype)
    actual = run(mix.q, mix.pool, LAYER, mix.batch, window, soft_cap)
    assert_close(actual, mix, plain(mix, shape, window), tolerance=3e-5)


def test_agrees_with_the_reference_and_takes_a_scale() -> None:
    shape = SHAPES[0]
    mix = stored(make_mix(np.random.default_rng(5), shape, [5, 3, 1], [2, 0, 9]), "f32")
    batch = jax.tree.map(np.asarray, mix.batch)
    expected = jax.jit(lambda q, pool: reference.attend(q, pool, LAYER, batch, window=4, scale=0.7))(
        mix.q, np.nan_to_num(mix.pool)
    )
    actual = run(mix.q, mix.pool, LAYER, mix.batch, 4, scale=0.7)
    np.testing.assert_allclose(actual[:9], expected[:9], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [0, 200])
def test_a_token_does_not_depend_on_chunks_or_company(kv_dtype: str, window: int) -> None:
    """To the bit: that is why cached and uncached runs agree."""
    shape = Shape(700, 6, 12, 64, 9, 3, 64)
    rng = np.random.default_rng(7)
    mix = stored(make_mix(rng, shape, [650, 1, 1], [50, 600, 3]), kv_dtype)
    whole = np.asarray(run(mix.q, mix.pool, LAYER, mix.batch, window))
    table = np.asarray(mix.batch.page_table)
    start = 0
    for count in (1, 2, 129, 500, 17, 1):
        # The next tokens of the first row, alone, and behind a chunk of another row.
        row = (start, count, 50 + start + count, table[0])
        other = (650, 1, 601, table[1])
        for rows in ([row], [row, other] if count > 1 else [other, row]):
            tokens = np.concatenate([np.arange(first, first + n) for first, n, _, _ in rows])
            counts = [n for _, n, _, _ in rows]
            batch = RaggedBatch(
                jnp.asarray([0, *np.cumsum(counts)], jnp.int32),
                jnp.asarray([length for *_, length, _ in rows], jnp.int32),
                jnp.asarray([pages for *_, pages in rows]),
                jnp.int32(sum(n > 1 for n in counts)),
                jnp.int32(len(rows)),
            )
            again = np.asarray(run(mix.q[tokens], mix.pool, LAYER, batch, window))
            np.testing.assert_array_equal(again.view(np.uint32), whole[tokens].view(np.uint32))
        start += count
    assert start == 650


def test_padding_is_finite_and_an_empty_batch_too() -> None:
    shape = SHAPES[0]
    mix = stored(make_mix(np.random.default_rng(0), shape, [], []), "f32")
    assert np.isfinite(run(mix.q, mix.pool, LAYER, mix.batch, 0)).all()
    mix = stored(make_mix(np.random.default_rng(0), shape, [2, 1], [0, 4]), "f32")
    assert np.isfinite(run(np.full_like(mix.q, 1.0), mix.pool, LAYER, mix.batch, 0)).all()


def test_a_nan_reaches_those_who_see_it_and_nobody_else() -> None:
    shape = SHAPES[2]
    mix = stored(make_mix(np.random.default_rng(2), shape, [20, 1], [200, 300]), "f32")
    page, slot = np.asarray(mix.batch.page_table)[0, 210 // 16], 210 % 16
    clean = np.asarray(run(mix.q, mix.pool, LAYER, mix.batch, 0))
    for part in (slice(0, 32), slice(32, 64)):
        pool = mix.pool.copy()
        pool[page, LAYER, slot, 1, part] = np.nan
        out = np.asarray(run(mix.q, pool, LAYER, mix.batch, 0))
        blind = np.ones(out.shape[:2], bool)
        blind[10:20, 1] = False
        np.testing.assert_array_equal(out[blind], clean[blind])
        assert np.isnan(out[10:20, 1]).all()


def test_every_code_of_8_bits_reads_as_the_quantiser_says() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.array([2.0, 0.5], jnp.bfloat16).view(np.uint8)
    pool = np.zeros((16, 1, 1, 2 * 16 + SCALE_BYTES), np.uint8)
    pool[:, 0, 0, 16:] = np.concatenate([codes, np.tile(scales, (16, 1))], axis=1)
    rows = jnp.arange(16, dtype=jnp.int32)
    batch = RaggedBatch(
        jnp.arange(17, dtype=jnp.int32),
        jnp.ones(16, jnp.int32),
        rows[:, None],
        jnp.int32(0),
        jnp.int32(16),
    )
    out = run(np.ones((16, 1, 16), np.float32), pool, 0, batch, 0)
    np.testing.assert_array_equal(out[:, 0], np.asarray(decode(jnp.asarray(codes))) * 0.5)


def test_bf16_queries_give_bf16() -> None:
    shape = SHAPES[0]
    mix = stored(make_mix(np.random.default_rng(1), shape, [7, 4, 1, 1], [3, 0, 20, 6]), "bf16")
    mix = mix._replace(q=np.asarray(mix.q, jnp.bfloat16))
    actual = run(mix.q, mix.pool, LAYER, mix.batch, 0)
    assert actual.dtype == jnp.bfloat16
    expected = plain(mix._replace(q=mix.q.astype(np.float32)), shape, 0)
    assert_close(actual, mix, expected, tolerance=2.0**-8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page_table": np.full((6, 8), 49, np.int32)}, "row 0 has page 49, outside the pool"),
        ({"page_table": np.full((6, 8), -1, np.int32)}, "row 0 has page -1, outside the pool"),
        ({"kv_lens": np.full(6, 33, np.int32)}, "row 0 has more positions than its page table"),
        ({"kv_lens": np.full(6, 2, np.int32)}, "row 0 has more tokens than positions"),
        ({"q_starts": np.arange(7, dtype=np.int32) * 9}, "row 2 has tokens outside the 24 of the batch"),
        ({"num_rows": np.int32(7)}, "more rows than the batch has room for"),
        ({"num_rows": np.int32(-1)}, "more rows than the batch has room for"),
    ],
)
def test_a_batch_that_does_not_fit_the_pool_fails(wrong: dict[str, np.ndarray], message: str) -> None:
    shape = SHAPES[0]
    mix = stored(make_mix(np.random.default_rng(0), shape, [5, 3, 2], [20, 9, 7]), "f32")
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(mix.q, mix.pool, LAYER, mix.batch._replace(**wrong), 0))


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_outside_the_pool_fails(layer: int) -> None:
    shape = SHAPES[0]
    mix = stored(make_mix(np.random.default_rng(0), shape, [5], [20]), "f32")
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"layer {layer} is outside the pool"):
        jax.block_until_ready(run(mix.q, mix.pool, jnp.int32(layer), mix.batch, 0))
    k = jnp.zeros((1, shape.kv_heads, shape.head_dim))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"layer {layer} is outside the pool"):
        jax.block_until_ready(jax.jit(write_kv)(mix.pool, k, k, jnp.zeros(1, jnp.int32), layer))


def test_heads_that_do_not_match_fail() -> None:
    shape = SHAPES[0]
    mix = stored(make_mix(np.random.default_rng(0), shape, [5], [20]), "f32")
    for q in (mix.q[..., :8], mix.q[:, :3]):
        with pytest.raises(jax.errors.JaxRuntimeError, match="heads of q and those of the pool do not match"):
            jax.block_until_ready(run(q, mix.pool, LAYER, mix.batch, 0))
    k = jnp.zeros((1, shape.kv_heads, shape.head_dim // 2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="not as wide as the pool's"):
        jax.block_until_ready(jax.jit(write_kv)(mix.pool, k, k, jnp.zeros(1, jnp.int32), 0))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5])
def test_write_kv_equals_the_one_in_xla(kv_dtype: str, kv_heads: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    pool = make_pool(kv_dtype, PoolShape(6, LAYERS, 4, kv_heads, 16, kv_dtype == "fp8"))
    k, v = rng.standard_normal((2, tokens, kv_heads, 16)).astype(np.float32)
    slots = rng.permutation(24)[:tokens].astype(np.int32)
    actual = jax.jit(write_kv)(pool, k, v, slots, jnp.int32(LAYER))
    expected = jax.jit(pages.write_kv)(pool, k, v, slots, jnp.int32(LAYER))
    assert actual.dtype == pool.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    assert (np.asarray(actual) != np.asarray(pool)).any()


@pytest.mark.parametrize("slot", [-1, 28])
def test_write_kv_refuses_a_slot_outside_the_pool(slot: int) -> None:
    pool = make_pool("f32", PoolShape(6, LAYERS, 4, 3, 16))
    kv = jnp.zeros((1, 3, 16))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"slot {slot} is outside the pool"):
        jax.block_until_ready(jax.jit(write_kv)(pool, kv, kv, jnp.asarray([slot], jnp.int32), 0))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_scan_over_layers_keeps_the_pool_in_place(kv_dtype: str) -> None:
    shape = PoolShape(200, 8, 16, 3, 64, kv_dtype == "fp8")
    pool = make_pool(kv_dtype, shape)

    def step(pool: jax.Array, x: jax.Array, batch: RaggedBatch, slots: jax.Array):
        def body(carry, layer):
            x, pool = carry
            pool = write_kv(pool, x[:, :3], x[:, 3:6], slots, layer)
            return (attend(x, pool, layer, batch, window=layer * 10), pool), None

        return jax.lax.scan(body, (x, pool), jnp.arange(8, dtype=jnp.int32))[0]

    rows = np.arange(4, dtype=np.int32)
    table = np.arange(28, dtype=np.int32).reshape(4, 7)
    batch = RaggedBatch(
        jnp.arange(5, dtype=jnp.int32),
        jnp.full(4, 100, jnp.int32),
        jnp.asarray(table),
        jnp.int32(0),
        jnp.int32(4),
    )
    x, slots = jnp.ones((4, 9, 64)), jnp.asarray(table[rows, 6] * 16 + 3)
    size, address = pool.nbytes, pool.unsafe_buffer_pointer()
    compiled = jax.jit(step, donate_argnums=0).lower(pool, x, batch, slots).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 50
    _, pool = compiled(pool, x, batch, slots)
    assert pool.unsafe_buffer_pointer() == address


def make_pool(kv_dtype: str, shape: PoolShape) -> jax.Array:
    return jnp.zeros(shape.array, {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}[kv_dtype])
