"""The pool's layout: what is written is what is gathered, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tierax.pallas_kernels.pages import PoolShape, gather_layer, write_kv

SHAPE = PoolShape(pages=6, layers=3, page_size=4, kv_heads=2, head_dim=8)


def test_sizes() -> None:
    assert SHAPE.array == (7, 3, 4, 2, 16)
    assert SHAPE.page_elements == 3 * 4 * 2 * 16


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
