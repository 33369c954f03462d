"""The same shapes on this machine's CPU, where kernels can run: what they write and read, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aot.cases import SHAPES, shape_id, shape_name
from aot.programs import DTYPES
from aot.results import Record, Report
from helpers.attention_mixes import LAYER, LAYERS, Shape, assert_close, make_mix, plain
from tierax.pallas_kernels import attention
from tierax.pallas_kernels.kernels import AttentionShape, Target
from tierax.pallas_kernels.pages import PoolShape
from tierax.pallas_kernels.quant import dequantize_kv, quantize_kv

COUNTS, CONTEXTS = [9, 5, 1, 1, 1], [0, 20, 37, 0, 63]
"""Chunks with and without a cached prefix, and decodes: of a first token, and up to the end of a page."""
TOLERANCES = {"f32": 2e-5, "bf16": 2e-2}
"""Of results that are rounded to the queries' dtype."""


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("backend", ["native", "xla"])
def test_kernels(backend: str, shape: AttentionShape, report: Report) -> None:
    kernels = attention.select(Target("cpu"), shape, backend)
    sizes = Shape(24, 6, 4, shape.page_size, shape.heads, shape.kv_heads, shape.head_dim)
    written = make_mix(np.random.default_rng(0), sizes, COUNTS, CONTEXTS)
    dtype, kv_dtype = DTYPES[shape.dtype], DTYPES[shape.kv_dtype]
    stored = [_stored(k, v, shape.kv_dtype) for k, v in zip(written.k, written.v, strict=True)]
    mix = written._replace(
        q=np.asarray(jnp.asarray(written.q, dtype), np.float32),
        k=[k for k, _ in stored],
        v=[v for _, v in stored],
    )

    table, page_size = np.asarray(mix.batch.page_table), shape.page_size
    positions = [np.arange(len(k)) for k in mix.k]
    slots = [table[row, at // page_size] * page_size + at % page_size for row, at in enumerate(positions)]
    pool_shape = PoolShape(table.size, LAYERS, page_size, *shape[1:3], quantized=shape.kv_dtype == "fp8")
    pool = jnp.zeros(pool_shape.array, kv_dtype)
    k, v = (jnp.asarray(np.concatenate(rows), dtype) for rows in (written.k, written.v))
    pool = jax.jit(kernels.write_kv, donate_argnums=0)(
        pool, k, v, jnp.asarray(np.concatenate(slots), jnp.int32), LAYER
    )
    out = jax.jit(kernels.attend)(jnp.asarray(mix.q, dtype), pool, LAYER, mix.batch)

    assert_close(out, mix, plain(mix, sizes, window=0), TOLERANCES[shape.dtype])
    report(
        Record("CPU", backend, shape_name(shape), "kernels", 1, shape.dtype, shape.kv_dtype, page_size, "run")
    )


def _stored(k: np.ndarray, v: np.ndarray, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """K and V as a pool of that kind gives them back."""
    if kv_dtype == "fp8":
        # They reach the pool in bf16.
        kv = quantize_kv(jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16))
        k, v = np.split(np.asarray(dequantize_kv(kv)), 2, -1)
        return k, v
    dtype = DTYPES[kv_dtype]
    return np.asarray(jnp.asarray(k, dtype), np.float32), np.asarray(jnp.asarray(v, dtype), np.float32)
