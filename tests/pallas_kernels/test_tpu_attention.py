"""The TPU attention kernel in both of Pallas' interpreters, against plain NumPy.

`interpret=True` is quick and copies at once; `pltpu.InterpretParams()` keeps copies apart from their waits, and its memory
is NaN until written. It cannot reinterpret a reference's words, as the kernel does with heads that share one (two of bf16,
four of fp8): those run in the first interpreter only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from helpers.attention_mixes import LAYER, POISON, Mix, Shape, assert_close, make_mix, plain, random_mix
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.quant import dequantize_kv, quantize_kv
from tierax.pallas_kernels.tpu.attention import MAX_TABLE_WIDTH, attend
from tierax.pallas_kernels.tpu.blocks import Blocks

DECODE, CHUNK = Blocks(1, 32, 3), Blocks(8, 32, 2)
SMALL = Shape(14, 4, 5, 16, 4, 2, 32)


@cache
def kernel(shape: Shape, dtype: str, kv_dtype: str, copies: bool, scale: float | None) -> Any:
    """Compiled once for a shape, whatever the mix. copies: in the interpreter that keeps copies apart from waits."""
    interpret = pltpu.InterpretParams() if copies else True

    def run(mix_q: jax.Array, mix_pool: jax.Array, batch: RaggedBatch, window: jax.Array) -> jax.Array:
        options = {"soft_cap": shape.soft_cap, "scale": scale, "interpret": interpret}
        q, pool = mix_q.astype({"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]), stored(mix_pool, kv_dtype)
        layer = jnp.int32(LAYER)
        return attend(q, pool, layer, batch, window=window, decode=DECODE, chunk=CHUNK, **options)

    # Of the compiler's time, which is nearly all that these tests take, a third goes into speed.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def stored(pool: jax.Array, kv_dtype: str) -> jax.Array:
    """A mix's pool in the array of a pool of another dtype; a single KV head has no axis."""
    pool = pool[..., 0, :] if pool.shape[-2] == 1 else pool
    if kv_dtype == "fp8":
        return quantize_kv(*jnp.split(pool, 2, axis=-1))
    return pool.astype({"f32": jnp.float32, "bf16": jnp.bfloat16}[kv_dtype])


through_fp8 = jax.jit(lambda k, v: dequantize_kv(quantize_kv(k, v)))


def rounded(mix: Mix, dtype: str, kv_dtype: str) -> Mix:
    """The mix as the kernel sees its numbers."""

    def read_back(k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        if kv_dtype == "fp8":
            return np.split(np.asarray(through_fp8(k, v)), 2, axis=-1)
        if kv_dtype == "bf16":
            return [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (k, v)]
        return [k, v]

    pairs = [read_back(k, v) for k, v in zip(mix.k, mix.v, strict=True)]
    q = mix.q if dtype == "f32" else mix.q.astype(ml_dtypes.bfloat16).astype(np.float32)
    return mix._replace(q=q, k=[k for k, _ in pairs], v=[v for _, v in pairs])


def check(
    mix: Mix, shape: Shape, window: int = 0, dtype="f32", kv_dtype="f32", copies=False, scale=None
) -> None:
    pool = np.where(mix.pool == POISON, np.nan, mix.pool)
    run = kernel(shape, dtype, kv_dtype, copies, scale)
    actual = run(mix.q, pool, mix.batch, jnp.int32(window))
    assert actual.shape == mix.q.shape
    assert actual.dtype == {"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]
    expected = plain(rounded(mix, dtype, kv_dtype), shape, window, scale)
    # With bf16 queries weights are rounded to bf16 as well, unless KV is f32.
    assert_close(actual, mix, expected, 1.5e-2 if dtype == "bf16" else 2e-5)
    assert np.isfinite(np.asarray(actual, np.float32)).all(), "padding"


EDGES = [
    ([9, 2, 1, 1], [0, 30, 79, 0]),
    ([8, 6], [72, 16]),
    ([14], [33]),
    ([1, 1, 1, 1], [0, 15, 16, 31]),
    ([1], [63]),
    ([], []),
]
"""Query tokens and contexts: full and partial tiles, contexts that end at, before and after the ends of pages and blocks,
a row of one token, no rows at all."""


@pytest.mark.parametrize("copies", [False, True], ids=["at once", "copies"])
def test_rows_at_the_edges_of_tiles_pages_and_windows(copies: bool) -> None:
    for number, (counts, contexts) in enumerate(EDGES):
        mix = make_mix(np.random.default_rng(number), SMALL, counts, contexts)
        for window in (0, 1, 16, 17, 40) if not copies else (0, 17):
            check(mix, SMALL, window, copies=copies)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), window=st.integers(0, 90))
def test_any_mix(seed: int, window: int) -> None:
    check(random_mix(np.random.default_rng(seed), SMALL), SMALL, window)


MODELS = [
    (Shape(12, 3, 4, 16, 9, 3, 64), "bf16", "bf16", True),
    (Shape(1, 1, 4, 16, 4, 1, 32), "f32", "bf16", True),
    (Shape(1, 1, 4, 16, 4, 4, 16, 30.0), "bf16", "fp8", False),
    (Shape(12, 3, 4, 16, 4, 2, 128), "f32", "bf16", False),
]
"""The demo model's heads, a single KV head, and heads that share words; a program of one token has no chunks, and compiles
in half the time."""


@pytest.mark.parametrize(("shape", "dtype", "kv_dtype", "copies"), MODELS, ids=str)
def test_dtypes_and_heads(shape: Shape, dtype: str, kv_dtype: str, copies: bool) -> None:
    mixes = [([9, 2, 1], [0, 30, 60]), ([1, 1], [0, 31])] if shape.tokens > 1 else [([1], [60]), ([1], [0])]
    for number, (counts, contexts) in enumerate(mixes):
        mix = make_mix(np.random.default_rng(number), shape, counts, contexts)
        for window in (0, 20):
            check(mix, shape, window, dtype, kv_dtype, copies)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [False, True], ids=["at once", "copies"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [
        (6, 3, 80, 16),
        (4, 2, 96, 48),
        (2, 1, 256, 16),
        (8, 8, 16, 256),
        (5, 5, 112, 16),
        (14, 2, 64, 32),
        (8, 4, 128, 64),
        (1, 1, 64, 256),
    ],
)
def test_grid_of_shapes(heads: int, kv_heads: int, head_dim: int, page_size: int, copies: bool) -> None:
    shape = Shape(12, 3, max(2, 128 // page_size), page_size, heads, kv_heads, head_dim)
    rng = np.random.default_rng(heads * head_dim)
    for kv_dtype, size in (("f32", 1), ("bf16", 2), ("fp8", 4)):
        if copies and size > 1 and kv_heads > 1 and kv_heads % size == 0:
            continue
        for window in (0, 21):
            check(random_mix(rng, shape), shape, window, "f32", kv_dtype, copies)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 6), "kv_heads")
    shape = Shape(
        tokens=data.draw(st.integers(1, 40), "tokens"),
        rows=data.draw(st.integers(1, 5), "rows"),
        pages_per_row=data.draw(st.integers(1, 6), "pages_per_row"),
        page_size=16 * data.draw(st.integers(1, 4), "page_size / 16"),
        heads=kv_heads * data.draw(st.integers(1, 5), "group"),
        kv_heads=kv_heads,
        head_dim=16 * data.draw(st.integers(1, 10), "head_dim / 16"),
        soft_cap=data.draw(st.sampled_from([0.0, 15.0]), "soft_cap"),
    )
    shape = shape._replace(rows=min(shape.rows, shape.tokens))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    kv_dtype = data.draw(st.sampled_from(["f32", "bf16", "fp8"]), "kv_dtype")
    scale = data.draw(st.sampled_from([None, 0.3]), "scale")
    for window in (0, data.draw(st.integers(1, 80), "window")):
        check(random_mix(rng, shape), shape, window, "f32", kv_dtype, scale=scale)


def test_rows_without_tokens_change_nothing() -> None:
    mix = make_mix(np.random.default_rng(0), SMALL, [9, 2], [0, 30])
    starts, lens, table = (np.asarray(a) for a in mix.batch[:3])
    order = [-1, 0, -1, 1]
    counts = [0 if row < 0 else int(starts[row + 1] - starts[row]) for row in order]
    batch = RaggedBatch(
        jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
        jnp.asarray([0 if row < 0 else lens[row] for row in order], jnp.int32),
        jnp.asarray(table[order]),
        num_chunks=jnp.int32(4),
        num_rows=jnp.int32(4),
    )
    run = kernel(SMALL, "f32", "f32", False, None)
    actual = run(mix.q, mix.pool, batch, jnp.int32(0))
    assert_close(actual, mix, plain(mix, SMALL, 0))
    np.testing.assert_array_equal(np.asarray(actual)[11:], mix.q[11:], "tokens of no row keep what they held")


def test_a_table_too_wide_for_scalar_memory_is_refused() -> None:
    scalars: list[Any] = [
        jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((3,), (2,), (2, MAX_TABLE_WIDTH + 1), (), ())
    ]
    batch = RaggedBatch(*scalars)
    q = jax.ShapeDtypeStruct((4, 4, 64), jnp.float32)
    pool = jax.ShapeDtypeStruct((9, 2, 16, 2, 128), jnp.float32)
    with pytest.raises(ValueError, match=r"page table of 2 x 65537: at most 16384 x 65536 fit"):
        jax.eval_shape(
            lambda q, pool, batch: attend(q, pool, 0, batch, decode=DECODE, chunk=CHUNK), q, pool, batch
        )
