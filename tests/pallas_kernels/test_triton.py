"""The Triton kernels, interpreted, against plain NumPy and the reference; lowered for CUDA; and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from helpers.attention_mixes import (
    LAYER,
    POISON,
    Mix,
    Shape,
    assert_close,
    make_mix,
    plain,
    random_mix,
)
from tierax.pallas_kernels import attention, quant
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.gpu import triton
from tierax.pallas_kernels.gpu.triton_attention import attend
from tierax.pallas_kernels.gpu.triton_blocks import Blocks, blocks_for
from tierax.pallas_kernels.gpu.triton_softmax import decode_codes
from tierax.pallas_kernels.kernels import AttentionShape, Target
from tierax.pallas_kernels.pages import PoolShape

quantize, dequantize = jax.jit(quant.quantize_kv), jax.jit(quant.dequantize_kv)
SMALL = Blocks(32, 16, 4, 2, 16, 4, 2, decode_pieces=5)
"""Blocks that short rows fill many of."""
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}
A100 = Target("gpu", "8.0")
QWEN3_8B = AttentionShape(32, 8, 128, 64, "bf16", "bf16")
DEMO = AttentionShape(9, 3, 64, 16, "bf16", "bf16")
SHAPES = [
    Shape(24, 6, 8, 4, 4, 2, 16),
    # Three KV heads, groups of three, and heads of 24: all padded. Pages of one token.
    Shape(40, 5, 48, 1, 9, 3, 24, 20.0),
    # One KV head, whose pool has no axis for it; groups that need more rows than a block has.
    Shape(33, 5, 6, 16, 40, 1, 8),
    Shape(1, 1, 20, 16, 4, 2, 16),
]


def interpreted(shape: Shape, blocks: Blocks = SMALL, scale: float | None = None) -> Callable[..., jax.Array]:
    """`(q, pool, batch, window) -> out`, compiled once."""

    def run(q: jax.Array, pool: jax.Array, batch: RaggedBatch, window: jax.Array) -> jax.Array:
        return attend(
            q,
            pool,
            jnp.int32(LAYER),
            batch,
            window=window,
            soft_cap=shape.soft_cap,
            scale=scale,
            blocks=blocks,
            interpret=True,
        )

    return jax.jit(run, compiler_options=QUICK_TO_COMPILE)


def poisoned(mix: Mix, poison: float) -> np.ndarray:
    """The pool as `PoolShape` has it, with something else where nothing was written."""
    pool = np.where(mix.pool == POISON, np.float32(poison), mix.pool)
    return pool[:, :, :, 0] if pool.shape[3] == 1 else pool


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_plain_numpy_over_ragged_mixes(shape: Shape) -> None:
    rng = np.random.default_rng(shape.tokens)
    scale = 0.7 if shape.soft_cap else None
    run = interpreted(shape, scale=scale)
    for round in range(10):
        mix = random_mix(rng, shape)
        window = (0, 0, 1, 5, 33)[round % 5]
        out = run(mix.q, poisoned(mix, np.nan), mix.batch, jnp.int32(window))
        assert out.shape == mix.q.shape
        assert np.isfinite(np.asarray(out)).all()
        assert_close(out, mix, plain(mix, shape, window, scale))


EDGES = Shape(96, 8, 24, 16, 4, 2, 16)
run_edges = interpreted(EDGES, SMALL._replace(decode_pieces=24))


@pytest.mark.parametrize(
    ("counts", "contexts"),
    [
        ([16, 15, 17, 1], [0, 1, 15, 16]),  # tiles of 16 tokens and blocks of 16, one less and one more
        ([33, 2, 1, 1], [31, 0, 255, 0]),
        ([96], [288]),  # all of the room there is, in one row
        ([1, 1, 1, 1, 1, 1, 1, 1], [255, 0, 1, 14, 15, 16, 31, 32]),
        ([2], [0]),
        ([1], [383]),  # cut into more pieces than are joined at a time
        ([], []),
    ],
)
@pytest.mark.parametrize("window", [0, 1, 15, 16, 17])
def test_edges_of_tiles_blocks_pages_and_windows(counts: list[int], contexts: list[int], window: int) -> None:
    mix = make_mix(np.random.default_rng(7), EDGES, counts, contexts)
    out = run_edges(mix.q, poisoned(mix, np.nan), mix.batch, jnp.int32(window))
    assert_close(out, mix, plain(mix, EDGES, window))
    assert not np.asarray(out)[sum(counts) :].any()


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_mix(data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.integers(2, 40), max_size=3))
    while sum(chunks) > 80:
        chunks.pop()
    counts = chunks + [1] * data.draw(st.integers(0, EDGES.rows - len(chunks)))
    contexts = [data.draw(st.integers(0, 384 - count)) for count in counts]
    window = data.draw(st.integers(0, 390))
    mix = make_mix(np.random.default_rng(len(counts)), EDGES, counts, contexts)
    out = run_edges(mix.q, poisoned(mix, np.nan), mix.batch, jnp.int32(window))
    assert_close(out, mix, plain(mix, EDGES, window))


def test_an_empty_row_among_chunks() -> None:
    mix = make_mix(np.random.default_rng(1), EDGES, [20, 18], [3, 40])
    starts, lens, table = map(np.array, mix.batch[:3])
    starts = np.insert(starts, 1, starts[1])[:-1]
    lens, table = np.insert(lens, 1, 0)[:-1], np.insert(table, 1, 0, axis=0)[:-1]
    starts, lens, table = jnp.asarray(starts), jnp.asarray(lens), jnp.asarray(table)
    batch = RaggedBatch(starts, lens, table, jnp.int32(3), jnp.int32(3))
    out = run_edges(mix.q, poisoned(mix, np.nan), batch, jnp.int32(0))
    expected = plain(mix, EDGES, 0)
    np.testing.assert_allclose(out[:20], expected[0], atol=2e-5)
    np.testing.assert_allclose(out[20:38], expected[1], atol=2e-5)


def test_bf16() -> None:
    shape = SHAPES[0]
    mix = make_mix(np.random.default_rng(3), shape, [7, 4, 1, 1], [3, 0, 20, 6])
    rounded = mix._replace(
        q=_bf16(mix.q), k=[_bf16(k) for k in mix.k], v=[_bf16(v) for v in mix.v], pool=_bf16(mix.pool)
    )
    q, pool = jnp.asarray(mix.q, jnp.bfloat16), jnp.asarray(poisoned(mix, np.nan), jnp.bfloat16)
    out = interpreted(shape)(q, pool, mix.batch, jnp.int32(0))
    assert out.dtype == jnp.bfloat16
    # Weights and results are rounded to 8 bits of mantissa.
    assert_close(out, mix, plain(rounded, shape, 0), 1e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_8_bit_kv(dtype: str, tolerance: float) -> None:
    shape = SHAPES[0]
    mix = make_mix(np.random.default_rng(4), shape, [9, 3, 1, 1], [5, 0, 31, 0])
    unwritten = mix.pool[..., :1] == POISON
    k, v = np.split(np.where(unwritten, 1, mix.pool), 2, axis=-1)
    # Bytes of 0xFF make the scale a NaN.
    pool = jnp.where(unwritten, jnp.uint8(0xFF), quantize(k, v))
    codes = quantize(np.concatenate(mix.k), np.concatenate(mix.v))
    ends = np.cumsum([len(k) for k in mix.k])[:-1]
    k, v = (np.split(x, ends) for x in np.split(np.asarray(dequantize(codes)), 2, axis=-1))
    rounded = mix._replace(k=k, v=v)
    out = interpreted(shape)(jnp.asarray(mix.q, dtype), pool, mix.batch, jnp.int32(0))
    assert out.dtype == dtype
    assert_close(out, mix, plain(rounded, shape, 0), tolerance)


def test_codes_are_read_as_the_quantizer_means_them() -> None:
    codes = jnp.arange(256, dtype=jnp.uint8)
    np.testing.assert_array_equal(decode_codes(codes), quant.decode(codes))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    tokens, rows = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    page_size = data.draw(st.sampled_from([1, 2, 8, 16, 48, 64]))
    width = data.draw(st.integers(1, 160 // page_size + 1))
    head_dim = data.draw(st.integers(1, 20)) * 8
    cap = data.draw(st.sampled_from([0.0, 5.0]))
    shape = Shape(
        tokens, min(rows, tokens), width, page_size, kv_heads * group, kv_heads, head_dim, soft_cap=cap
    )
    size = st.sampled_from([16, 32, 64])
    blocks = Blocks(
        data.draw(size), data.draw(size), 4, 2, data.draw(size), 4, 2, data.draw(st.integers(1, 40))
    )
    run = interpreted(shape, blocks)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for window in (0, 7):
        mix = random_mix(rng, shape)
        out = run(mix.q, poisoned(mix, np.nan), mix.batch, jnp.int32(window))
        assert_close(out, mix, plain(mix, shape, window), 4e-5)


def abstract_step(shape: AttentionShape, pages: int = 1000, target: Target = A100) -> tuple[Any, tuple]:
    """Attention in a scan over the layers of a pool that it carries, and what to lower it with."""
    dtypes = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}
    attend = triton.kernels(target, shape).attend
    layers, rows, tokens = 4, 32, 64
    quantized = shape.kv_dtype == "fp8"
    pool = PoolShape(pages, layers, shape.page_size, shape.kv_heads, shape.head_dim, quantized)

    def step(q: jax.Array, pool: jax.Array, batch: RaggedBatch, windows: jax.Array) -> tuple:
        def layer(carry: tuple, index_and_window: tuple) -> tuple:
            q, pool = carry
            index, window = index_and_window
            return (attend(q, pool, index, batch, window=window), pool), None

        return jax.lax.scan(layer, (q, pool), (jnp.arange(layers), windows))[0]

    array: Any = jax.ShapeDtypeStruct
    scalar = array((), jnp.int32)
    batch = RaggedBatch(
        array((rows + 1,), jnp.int32), array((rows,), jnp.int32), array((rows, 40), jnp.int32), scalar, scalar
    )
    q = array((tokens, shape.heads, shape.head_dim), dtypes[shape.dtype])
    return step, (q, array(pool.array, dtypes[shape.kv_dtype]), batch, array((layers,), jnp.int32))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    "shape",
    [
        QWEN3_8B,
        QWEN3_8B._replace(kv_dtype="fp8"),
        DEMO,
        DEMO._replace(dtype="f32", kv_dtype="f32"),
        AttentionShape(32, 1, 96, 16, "bf16", "bf16"),
    ],
    ids=str,
)
def test_lowers_for_cuda(shape: AttentionShape) -> None:
    step, arguments = abstract_step(shape)
    # Of a GPU that need not be here, whose kind later versions of jax must be told.
    device = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("attend_chunks", "attend_decodes", "join_decodes"):
        assert kernel in text


def kernels_in(pages: int, shape: AttentionShape) -> bool:
    step, arguments = abstract_step(shape, pages)
    return "pallas_call" in str(jax.make_jaxpr(step)(*arguments))


def test_pools_that_the_lowering_cannot_count_the_bytes_of_are_left_to_xla() -> None:
    fp8 = QWEN3_8B._replace(kv_dtype="fp8")
    page_bytes = 4 * 64 * 8 * (2 * 128 + 4)
    assert kernels_in(2**31 // page_bytes - 1, fp8)
    assert not kernels_in(2**31 // page_bytes + 1, fp8)
    assert not kernels_in(2**32 // page_bytes - 1, fp8)
    assert kernels_in(2**32 // page_bytes + 1, fp8)
    assert kernels_in(2**32 // page_bytes - 1, QWEN3_8B)


def test_what_is_refused() -> None:
    def reason(target: Target = A100, **changes: Any) -> str | None:
        return triton.refuses(target, DEMO._replace(**changes))

    assert reason() is None
    assert reason(Target("gpu", "8.9"), kv_dtype="fp8") is None
    assert reason(Target("gpu", "12.0"), head_dim=256) is None
    assert reason(Target("cpu")) == "needs an NVIDIA GPU"
    assert reason(Target("tpu", "v6e")) == "needs an NVIDIA GPU"
    assert "8.0 (Ampere) or newer, and this is 7.5" in str(reason(Target("gpu", "7.5")))
    assert "up to 256, and these have 512" in str(reason(head_dim=512))
    assert "up to 64 query heads per KV head, and there are 71" in str(reason(heads=71, kv_heads=1))


def test_without_the_lowering_it_is_refused_and_xla_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = DEMO._replace(kv_dtype="f32", dtype="f32")
    ampere = Target("gpu", "8.6")
    assert attention.select(ampere, shape).name == "triton"
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton")
    assert attention.select(ampere, shape).name == "xla"
    with pytest.raises(ValueError, match=r"attention backend triton: this version of jax has no Triton"):
        attention.select(ampere, shape, "triton")


def test_every_shape_that_is_not_refused_has_blocks_in_powers_of_two() -> None:
    for head_dim in (1, 16, 33, 64, 80, 96, 128, 200, 256):
        for dtype, kv in (("bf16", "bf16"), ("bf16", "fp8"), ("f32", "f32"), ("f32", "bf16"), ("f32", "fp8")):
            shape = AttentionShape(24, 3, head_dim, 16, dtype, kv)
            for target in (A100, Target("gpu", "10.3")):
                assert triton.refuses(target, shape) is None
                *sizes, pieces = blocks_for(target, shape)
                assert pieces > 0
                for size in (sizes[0], sizes[1], sizes[4]):
                    assert size >= 16
                    assert size & (size - 1) == 0


def _bf16(values: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)
