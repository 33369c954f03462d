"""Ragged paged attention: the fast path and the package's reference against plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention_mixes import LAYER, Shape, assert_close, make_mix, plain, random_mix
from tierax.engine.config import ATTENTION_BACKENDS
from tierax.pallas_kernels import attention, reference, xla
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.kernels import AttentionShape, Target

SHAPES = [
    Shape(24, 6, 8, 4, 4, 2, 16),
    Shape(24, 6, 32, 1, 6, 2, 8),
    Shape(40, 7, 6, 16, 3, 3, 32),
    Shape(33, 5, 40, 4, 8, 1, 16, 20.0),
    Shape(1, 1, 20, 16, 4, 2, 16),
    Shape(330, 3, 60, 16, 4, 2, 8),
    Shape(9, 9, 80, 16, 4, 2, 8),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_xla_equals_plain_numpy_over_ragged_mixes(shape: Shape) -> None:
    rng = np.random.default_rng(shape.tokens)
    attend = jax.jit(
        lambda q, pool, layer, batch, window: xla.attend(
            q, pool, layer, batch, window=window, soft_cap=shape.soft_cap
        )
    )
    for round in range(10):
        mix = random_mix(rng, shape)
        window = (0, 0, 1, 5, 33)[round % 5]
        actual = attend(mix.q, mix.pool, jnp.int32(LAYER), mix.batch, jnp.int32(window))
        assert_close(actual, mix, plain(mix, shape, window))
        assert actual.shape == mix.q.shape


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
def test_xla_across_tiles_and_blocks(counts: list[int], contexts: list[int], window: int) -> None:
    shape = SHAPES[5]
    mix = make_mix(np.random.default_rng(3), shape, counts, contexts)
    actual = _attend_long(mix.q, mix.pool, mix.batch, jnp.int32(window))
    assert_close(actual, mix, plain(mix, shape, window))


@jax.jit
def _attend_long(q: jax.Array, pool: jax.Array, batch: RaggedBatch, window: jax.Array) -> jax.Array:
    return xla.attend(q, pool, LAYER, batch, window=window)


def test_the_reference_equals_plain_numpy() -> None:
    rng = np.random.default_rng(5)
    for shape, window, scale in ((SHAPES[0], 0, None), (SHAPES[3], 5, 0.5)):
        mix = make_mix(rng, shape, [5, 3, 1], [2, 0, 9])
        # Not traced, as the reference wants it, though the rest is: one program instead of a hundred small ones.
        batch = jax.tree.map(np.asarray, mix.batch)
        options = {"window": window, "soft_cap": shape.soft_cap, "scale": scale}
        attend = jax.jit(lambda q, pool: reference.attend(q, pool, LAYER, batch, **options))  # noqa: B023
        assert_close(attend(mix.q, mix.pool), mix, plain(mix, shape, window, scale))


def test_a_batch_of_padding_only_is_finite() -> None:
    shape = SHAPES[0]
    mix = make_mix(np.random.default_rng(0), shape, [], [])
    actual = jax.jit(xla.attend, static_argnums=2)(mix.q, mix.pool, LAYER, mix.batch)
    assert np.isfinite(np.asarray(actual)).all()


def test_bf16_queries_and_pool() -> None:
    shape = SHAPES[0]
    mix = make_mix(np.random.default_rng(1), shape, [7, 4, 1, 1], [3, 0, 20, 6])
    q, pool = jnp.asarray(mix.q, jnp.bfloat16), jnp.asarray(mix.pool, jnp.bfloat16)
    actual = jax.jit(xla.attend, static_argnums=2)(q, pool, LAYER, mix.batch)
    assert actual.dtype == jnp.bfloat16
    starts = np.asarray(mix.batch.q_starts)
    for row, out in enumerate(plain(mix, shape, 0)):
        np.testing.assert_allclose(
            np.asarray(actual, np.float32)[starts[row] : starts[row + 1]], out, atol=0.06, rtol=0.06
        )


def test_auto_selects_what_serves_and_an_unknown_name_is_refused() -> None:
    shape = AttentionShape(9, 3, 64, 16, "f32", "f32")
    assert tuple(attention.BACKENDS) == ATTENTION_BACKENDS[1:]
    assert attention.select(Target("riscv"), shape).name == "xla"
    assert attention.select(Target("cpu"), shape, "xla").attend is xla.attend
    with pytest.raises(ValueError, match=r"unknown attention backend 'cuda': choose auto or one of .*xla"):
        attention.select(Target("cpu"), shape, "cuda")
