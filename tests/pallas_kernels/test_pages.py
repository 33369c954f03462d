"""The pool's layout: what is written is what is gathered, and nothing else changes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tierax.pallas_kernels.pages import PoolShape, gather_layer, write_kv

SHAPE = PoolShape(pages=6, layers=3, page_size=4, kv_heads=2, head_dim=8)


def test_sizes() -> None:
    assert SHAPE.array == (7, 3, 4, 2, 16)
    assert SHAPE.page_elements == 3 * 4 * 2 * 16
    eight_bits = SHAPE._replace(quantized=True)
    assert eight_bits.array == (7, 3, 4, 2, 20)
    assert eight_bits.page_elements == 3 * 4 * 2 * 20
    for shape, dtype in ((SHAPE, jnp.float32), (SHAPE, jnp.bfloat16), (eight_bits, jnp.uint8)):
        for kv_heads in (1, 2):
            shape = shape._replace(kv_heads=kv_heads)
            assert PoolShape.of(jnp.zeros(shape.array, dtype)) == shape


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_write_lands_in_its_slots_and_nowhere_else(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    before = rng.standard_normal(SHAPE.array).astype(np.float32)
    slots = rng.permutation(SHAPE.pages * SHAPE.page_size)[:tokens].astype(np.int32)
    k, v = rng.standard_normal((2, tokens, SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float32)
    write = jax.jit(write_kv, donate_argnums=0)
    pool = jnp.array(before)
    after = np.array(write(pool, k, v, slots, jnp.int32(1)))
    assert pool.is_deleted(), "it is updated in place"

    expected = before.copy()
    expected[slots // 4, 1, slots % 4] = np.concatenate([k, v], -1)
    np.testing.assert_array_equal(after[: SHAPE.pages], expected[: SHAPE.pages])


def test_padding_goes_to_the_scratch_page() -> None:
    scratch = SHAPE.pages * SHAPE.page_size
    slots = np.array([5, scratch, scratch + 1, scratch + 2], np.int32)
    ones = np.ones((4, SHAPE.kv_heads, SHAPE.head_dim), np.float32)
    after = np.array(jax.jit(write_kv)(jnp.zeros(SHAPE.array), ones, ones, slots, 2))
    assert after[: SHAPE.pages].sum() == 2 * SHAPE.kv_heads * SHAPE.head_dim
    assert (after[1, 2, 1] == 1).all()


def test_gather_reads_one_layer_of_pages_in_their_order() -> None:
    pool = np.random.default_rng(0).standard_normal(SHAPE.array).astype(np.float32)
    pages = np.array([4, 0, 4], np.int32)
    rows = np.asarray(gather_layer(jnp.asarray(pool), jnp.asarray(pages), 2))
    np.testing.assert_array_equal(rows, pool[pages, 2].reshape(12, SHAPE.kv_heads, 16))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_pool_carried_through_layers_is_never_copied(kv_heads: int, tokens: int, quantized: bool) -> None:
    shape = PoolShape(256, layers=4, page_size=16, kv_heads=kv_heads, head_dim=64, quantized=quantized)
    dtype = jnp.dtype(jnp.uint8 if quantized else jnp.float32)
    kv = jax.ShapeDtypeStruct((tokens, kv_heads, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    pages = jax.ShapeDtypeStruct((8,), jnp.int32)

    def layers(pool: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, pages: jax.Array):
        def layer(carry, index):
            pool, seen = carry
            pool = write_kv(pool, k + seen, v, slots, index)
            rounds = slots[0]
            seen = lax.fori_loop(0, rounds, lambda _, x: x + gather_layer(pool, pages, index).mean(), seen)
            return (pool, seen), None

        return lax.scan(layer, (pool, jnp.float32(0)), jnp.arange(shape.layers))[0]

    pool = jax.ShapeDtypeStruct(shape.array, dtype)
    compiled = jax.jit(layers, donate_argnums=0).lower(pool, kv, kv, slots, pages).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = dtype.itemsize * math.prod(shape.array)
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 20
