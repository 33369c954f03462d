"""Paged attention and KV writes of the native library, against plain NumPy and against themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention_mixes import LAYER, Mix, Shape, assert_close, make_mix, plain, random_mix
from tierax.pallas_kernels import pages
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.cpu.attention import attend, write_kv
from tierax.pallas_kernels.cpu.library import library
from tierax.pallas_kernels.pages import PoolShape
from tierax.pallas_kernels.quant import dequantize_kv, quantize_kv

quantize, dequantize = jax.jit(quantize_kv), jax.jit(dequantize_kv)
native = pytest.mark.skipif(bool(library().absence), reason=library().absence or "the library is there")
SHAPES = [
    Shape(24, 6, 8, 4, 4, 2, 16),
    Shape(24, 6, 32, 1, 6, 2, 8),
    Shape(40, 7, 6, 16, 3, 3, 20),
    Shape(33, 5, 40, 4, 8, 1, 16, 20.0),
    Shape(1, 1, 20, 16, 9, 3, 64),
    Shape(330, 3, 60, 16, 4, 2, 80),
    Shape(9, 9, 80, 16, 4, 2, 128),
    Shape(20, 4, 3, 100, 2, 2, 256),
]


def run(mix: Mix, shape: Shape, window: int = 0) -> jax.Array:
    function = jax.jit(
        lambda q, pool, layer, batch, window: attend(
            q, pool, layer, batch, window=window, soft_cap=shape.soft_cap
        )
    )
    return function(mix.q, mix.pool, jnp.int32(LAYER), mix.batch, jnp.int32(window))


@native
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_plain_numpy_over_ragged_mixes(shape: Shape) -> None:
    rng = np.random.default_rng(shape.tokens)
    for round in range(8):
        mix = random_mix(rng, shape)
        window = (0, 0, 1, 5, 33)[round % 5]
        assert_close(run(mix, shape, window), mix, plain(mix, shape, window))


@native
@pytest.mark.parametrize(
    ("counts", "contexts"),
    [
        ([300, 20, 1], [500, 0, 900]),
        ([257, 73], [0, 640]),
        ([256, 2, 1], [256, 510, 511]),
        ([1, 1, 1], [959, 0, 127]),
    ],
)
@pytest.mark.parametrize("window", [0, 1, 128, 600])
def test_across_blocks(counts: list[int], contexts: list[int], window: int) -> None:
    shape = Shape(330, 3, 60, 16, 4, 2, 8)
    mix = make_mix(np.random.default_rng(3), shape, counts, contexts)
    assert_close(run(mix, shape, window), mix, plain(mix, shape, window))


@native
@pytest.mark.parametrize("cached", [1, 16, 100, 255, 256, 257, 498])
def test_a_token_is_the_same_to_the_bit_however_its_prompt_was_cut(cached: int) -> None:
    """Computed in one prefill of 500 tokens, in a chunk behind cached ones, and next to another row."""
    shape = Shape(510, 2, 40, 16, 9, 3, 64)
    mix = make_mix(np.random.default_rng(4), shape, [500], [0])
    whole = np.asarray(run(mix, shape))[:500]
    tail = 500 - cached
    other = [8, 9]
    batch = RaggedBatch(
        jnp.asarray([0, tail, tail + 1], jnp.int32),
        jnp.asarray([500, 3], jnp.int32),
        mix.batch.page_table.at[1].set(mix.batch.page_table[0]),
        num_chunks=jnp.int32(1),
        num_rows=jnp.int32(2),
    )
    q = np.concatenate(
        [mix.q[cached:500], mix.q[2:3], np.zeros((cached + len(other) + 7, 9, 64), np.float32)]
    )[:510]
    again = np.asarray(run(mix._replace(q=q, batch=batch), shape))
    np.testing.assert_array_equal(again[:tail], whole[cached:])
    np.testing.assert_array_equal(again[tail], whole[2])


@native
def test_nothing_that_no_row_may_see_is_used() -> None:
    shape = Shape(12, 3, 4, 16, 4, 2, 16)
    mix = make_mix(np.random.default_rng(5), shape, [7, 1], [20, 33])
    expected = plain(mix, shape, 9)
    poisoned = mix._replace(pool=np.where(np.abs(mix.pool) > 1e20, np.nan, mix.pool))
    actual = run(poisoned, shape, 9)
    assert_close(actual, mix, expected)


@native
def test_a_batch_of_padding_only_and_one_of_bf16_queries() -> None:
    shape = SHAPES[0]
    empty = make_mix(np.random.default_rng(0), shape, [], [])
    assert run(empty, shape).shape == empty.q.shape
    mix = make_mix(np.random.default_rng(1), shape, [7, 4, 1, 1], [3, 0, 20, 6])
    actual = run(mix._replace(q=jnp.asarray(mix.q, jnp.bfloat16)), shape)
    assert actual.dtype == jnp.bfloat16
    assert_close(actual.astype(jnp.float32), mix, plain(mix, shape, 0), 0.03)


@native
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_narrow_pools_are_read_as_they_are(kind: str) -> None:
    """The values that are stored, not those that were to be."""
    shape = Shape(20, 4, 6, 16, 6, 2, 32)
    mix = make_mix(np.random.default_rng(2), shape, [9, 5, 1, 1], [11, 0, 60, 15])
    kv = [np.concatenate([k, v], -1) for k, v in zip(mix.k, mix.v, strict=True)]
    if kind == "bf16":
        pool = jnp.asarray(mix.pool, jnp.bfloat16)
        stored = [np.asarray(jnp.asarray(part, jnp.bfloat16).astype(jnp.float32)) for part in kv]
    else:
        flat = jnp.asarray(np.where(np.abs(mix.pool) > 1e20, 1.0, mix.pool)).reshape(-1, 2, 2 * 32)
        pool = quantize(flat[..., :32], flat[..., 32:]).reshape(*mix.pool.shape[:-1], -1)
        stored = [
            np.asarray(dequantize(quantize(part[..., :32], part[..., 32:]))) for part in map(jnp.asarray, kv)
        ]
    seen = mix._replace(k=[part[..., :32] for part in stored], v=[part[..., 32:] for part in stored])
    assert_close(run(mix._replace(pool=pool), shape), mix, plain(seen, shape, 0))


@native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_writes_equal_those_in_xla_and_are_in_place(dtype: jnp.dtype, kv_heads: int) -> None:
    pool_shape = PoolShape(40, 2, 16, kv_heads, 16, dtype == jnp.uint8)
    rng = np.random.default_rng(6)
    k, v = jnp.asarray(rng.standard_normal((2, 5, kv_heads, 16)), jnp.float32)
    slots = jnp.asarray([3, 70, 16 * 39 + 15, 18, 16 * 40], jnp.int32)
    empty = jnp.zeros(pool_shape.array, dtype)
    expected = np.asarray(jax.jit(pages.write_kv)(empty, k, v, slots, 1))
    program = jax.jit(write_kv, donate_argnums=0).lower(empty, k, v, slots, jnp.int32(1)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == empty.nbytes
    assert memory.temp_size_in_bytes < empty.nbytes / 4
    np.testing.assert_array_equal(np.asarray(program(empty, k, v, slots, jnp.int32(1))), expected)


@native
def test_a_page_or_slot_outside_the_pool_fails_the_call() -> None:
    shape = Shape(4, 2, 4, 16, 4, 2, 16)
    mix = make_mix(np.random.default_rng(7), shape, [3], [9])
    outside = mix.batch._replace(page_table=mix.batch.page_table.at[0, 0].set(10_000))
    with pytest.raises(jax.errors.JaxRuntimeError, match="page"):
        jax.block_until_ready(run(mix._replace(batch=outside), shape))
    pool = jnp.zeros(PoolShape(4, 1, 16, 2, 16).array)
    k = jnp.ones((1, 2, 16))
    with pytest.raises(jax.errors.JaxRuntimeError, match="slot"):
        jax.block_until_ready(jax.jit(write_kv)(pool, k, k, jnp.asarray([10_000], jnp.int32), 0))
