"""What the TPU backend takes, the walk of its kernel, and that Mosaic accepts its kernels for every row of the table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from tierax.pallas_kernels import attention
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.kernels import AttentionShape, Target
from tierax.pallas_kernels.pages import PoolShape
from tierax.pallas_kernels.tpu import backend
from tierax.pallas_kernels.tpu.blocks import TUNING, blocks, token_bytes
from tierax.pallas_kernels.tpu.cursor import Cursor, Rows

KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}
SHAPES = [
    AttentionShape(32, 8, 128, 16, "bf16", "bf16"),
    AttentionShape(8, 2, 128, 16, "bf16", "fp8"),
    AttentionShape(9, 3, 64, 16, "f32", "f32"),
    AttentionShape(4, 1, 96, 64, "bf16", "bf16"),
]


def test_a_tpu_gets_this_backend_and_others_hear_why_not() -> None:
    demo = AttentionShape(9, 3, 64, 16, "bf16", "bf16")
    for generation in TUNING:
        assert attention.select(Target("tpu", generation), demo).name == "tpu"
    for target, shape, reason in (
        (Target("gpu", "9.0"), demo, "needs a TPU"),
        (Target("tpu", "v3"), demo, "no block sizes for TPU v3, only v5e, v5p, v6e, tpu7x"),
        (Target("tpu", "v6e"), demo._replace(page_size=8), "pages of 16 to 256 tokens .* not 8"),
        (Target("tpu", "v6e"), demo._replace(head_dim=72), "head_dim of 16 to 256 .* not 72"),
    ):
        with pytest.raises(ValueError, match=f"attention backend tpu: .*{reason}"):
            attention.select(target, shape, "tpu")
        assert attention.select(target, shape).name != "tpu"


@pytest.mark.parametrize("generation", TUNING)
@settings(max_examples=40, deadline=None)
@given(
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 40),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    page_size=st.sampled_from([16, 48, 256]),
    kv_dtype=st.sampled_from(["f32", "bf16", "fp8"]),
)
def test_blocks_of_any_shape_fit(
    generation: str, group: int, kv_heads: int, head_dim: int, page_size: int, kv_dtype: str
) -> None:
    shape = AttentionShape(group * kv_heads, kv_heads, head_dim, page_size, "bf16", kv_dtype)
    reason = backend.refuses(Target("tpu", generation), shape)
    if reason is not None:
        assert "too large for the TPU's VMEM" in reason
        assert page_size * token_bytes(shape) > 6 * 2**20
        return
    for sizes in blocks(generation, shape):
        assert sizes.q_tokens & (sizes.q_tokens - 1) == 0, "a tile's copies go by the bits of its size"
        assert sizes.kv_tokens % page_size == 0
        assert sizes.buffers >= 2
        assert sizes.kv_tokens * sizes.buffers * token_bytes(shape) <= TUNING[generation].vmem_bytes / 3


def test_a_token_takes_what_the_compiler_says_it_takes() -> None:
    """Of arrays compiled for v5e: bytes of a pool's argument / its tokens."""
    for kv_heads, head_dim, kv_dtype, taken in (
        (8, 128, "bf16", 4096),
        (2, 128, "bf16", 1024),
        (3, 64, "bf16", 1024),
        (1, 128, "bf16", 512),
        (8, 128, "fp8", 3072),
        (3, 64, "fp8", 1024),
        (1, 128, "fp8", 384),
        (2, 128, "fp8", 1536),
        (3, 64, "f32", 2048),
    ):
        assert token_bytes(AttentionShape(kv_heads, kv_heads, head_dim, 16, "bf16", kv_dtype)) == taken


@pytest.mark.parametrize(("shape", "generation"), [*zip(SHAPES, TUNING, strict=True)], ids=str)
def test_mosaic_takes_the_kernels(shape: AttentionShape, generation: str) -> None:
    """As far as jax alone can say; that they compile to the end is shown with libtpu, apart from this suite."""
    kernels = attention.select(Target("tpu", generation), shape)
    pool = PoolShape(64, 2, shape.page_size, shape.kv_heads, shape.head_dim, shape.kv_dtype == "fp8")

    def step(
        q: jax.Array, pool: jax.Array, k: jax.Array, slots: jax.Array, batch: RaggedBatch, window: jax.Array
    ):
        def layer(carry, index):
            q, pool = carry
            pool = kernels.write_kv(pool, k, k, slots, index)
            return (kernels.attend(q, pool, index, batch, window=window), pool), None

        return jax.lax.scan(layer, (q, pool), jnp.arange(2))[0]

    def abstract(*dims: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    dtype = DTYPES[shape.dtype]
    batch = RaggedBatch(abstract(9), abstract(8), abstract(8, 40), abstract(), abstract())
    q, k = (abstract(64, heads, shape.head_dim, dtype=dtype) for heads in (shape.heads, shape.kv_heads))
    device = AbstractDevice(device_kind=KINDS[generation], num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        exported = jax.export.export(jax.jit(step), platforms=["tpu"])(
            q, abstract(*pool.array, dtype=DTYPES[shape.kv_dtype]), k, abstract(64), batch, abstract()
        )
    calls = exported.mlir_module().count("tpu_custom_call")
    assert calls == (2 if shape.kv_heads == 1 else 3)


PAGE, BLOCK_PAGES, Q_TOKENS = 16, 2, 8
STEPS = 400


@jax.jit
def walk(
    q_starts: jax.Array, kv_lens: jax.Array, end: jax.Array, window: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows: Any = Rows(q_starts, kv_lens, end, window, Q_TOKENS, PAGE, BLOCK_PAGES)

    def visit(carry):
        at, steps, seen = carry
        step = jnp.stack([at.row, at.token, at.tokens, at.page(rows), at.pages(rows), at.unit])
        return at.next(rows), steps + 1, seen.at[steps].set(step)

    zero = jnp.int32(0)
    start = (Cursor.at(rows, zero, 0, 0), zero, jnp.zeros((STEPS, 6), jnp.int32))
    _, steps, seen = jax.lax.while_loop(lambda carry: carry[0].row < end, visit, start)
    return steps, seen


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 90)), min_size=0, max_size=6),
    window=st.integers(0, 60),
)
def test_the_walk_visits_each_tile_and_each_page_it_sees_once(
    rows: list[tuple[int, int]], window: int
) -> None:
    counts, contexts = [count for count, _ in rows], [context for _, context in rows]
    padded = np.zeros(6, np.int32)
    padded[: len(rows)] = np.add(counts, contexts)
    starts = np.full(7, sum(counts), np.int32)
    starts[: len(rows) + 1] = np.cumsum([0, *counts])
    steps, seen = walk(starts, padded, jnp.int32(len(rows)), jnp.int32(window))
    walked, units = [], set()
    for row, token, tokens, page, pages, unit in np.asarray(seen)[: int(steps)]:
        assert pages <= BLOCK_PAGES
        units.add(int(unit))
        walked += [(row, token + t, page + p) for t in range(tokens) for p in range(pages)]
    expected = []
    for row, (count, context) in enumerate(rows):
        for first in range(0, count, Q_TOKENS):
            tile = range(first, min(first + Q_TOKENS, count))
            low = max(0, context + first + 1 - window) // PAGE if window else 0
            pages = range(low, (context + tile.stop - 1) // PAGE + 1)
            expected += [(row, starts[row] + t, page) for t in tile for page in pages]
    assert sorted(walked) == sorted(expected)
    assert units == set(range(sum(max(1, -(-count // Q_TOKENS)) for count in counts)))
