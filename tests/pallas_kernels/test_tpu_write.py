"""KV writes by DMA in both of Pallas' interpreters, against the plain scatter."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tierax.pallas_kernels import pages
from tierax.pallas_kernels.pages import PoolShape
from tierax.pallas_kernels.tpu.write import RUN, write_kv

INTERPRETERS = pytest.mark.parametrize(
    "interpret", [True, pltpu.InterpretParams()], ids=["at once", "copies"]
)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}


written_at_once = jax.jit(partial(write_kv, interpret=True))
written_by_copies = jax.jit(partial(write_kv, interpret=pltpu.InterpretParams()))
scattered = jax.jit(pages.write_kv)


def check(shape: PoolShape, kv_dtype: str, slots: list[int], interpret: Any) -> None:
    """Padding names the scratch page, of whose contents nothing is known."""
    rng = np.random.default_rng(len(slots))
    pool = jnp.asarray(rng.integers(0, 100, shape.array), DTYPES[kv_dtype])
    k, v = jnp.asarray(rng.standard_normal((2, len(slots), shape.kv_heads, shape.head_dim)), jnp.float32)
    arguments = pool, k, v, jnp.asarray(slots, jnp.int32), jnp.int32(1)
    actual = (written_at_once if interpret is True else written_by_copies)(*arguments)
    expected = scattered(*arguments)
    assert actual.dtype == pool.dtype
    np.testing.assert_array_equal(np.asarray(actual)[: shape.pages], np.asarray(expected)[: shape.pages])
    written = np.asarray(actual)[: shape.pages] != np.asarray(pool)[: shape.pages]
    assert written.any() == any(slot < shape.pages * shape.page_size for slot in slots)
    assert not written[:, [0, 2]].any(), "other layers"


def chunk_then_decodes(shape: PoolShape) -> list[int]:
    """A chunk that starts within a page and goes on in one that is not the next, decodes, padding."""
    size, scratch = shape.page_size, shape.pages * shape.page_size
    chunk = [*range(2 * size + 3, 3 * size), *range(5 * size, 6 * size), *range(size, size + 7)]
    return [*chunk, 7 * size + 4, 3 * size + size - 1, *[scratch] * 5]


@INTERPRETERS
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "page_size", "kv_dtype"),
    [(3, 64, 16, "f32"), (2, 128, 32, "bf16"), (3, 64, 16, "fp8"), (1, 64, 16, "bf16")],
)
def test_a_step_is_written_as_the_scatter_does(
    kv_heads: int, head_dim: int, page_size: int, kv_dtype: str, interpret: Any
) -> None:
    shape = PoolShape(8, 3, page_size, kv_heads, head_dim, kv_dtype == "fp8")
    check(shape, kv_dtype, chunk_then_decodes(shape), interpret)


@INTERPRETERS
def test_runs_and_what_only_looks_like_one(interpret: Any) -> None:
    shape = PoolShape(8, 3, 32, 2, 16)
    run = list(range(64, 64 + RUN))
    swapped = [*run[:4], run[5], run[4], *run[6:]]
    across = list(range(32 - 8, 32 - 8 + RUN))
    for slots in (run, swapped, across, run[::-1]):
        check(shape, "f32", slots, interpret)


@INTERPRETERS
def test_one_token_and_padding_only(interpret: Any) -> None:
    shape = PoolShape(4, 3, 16, 2, 16)
    check(shape, "f32", [17], interpret)
    check(shape, "f32", [64] * 3, interpret)
