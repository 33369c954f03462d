"""Batches of rows whose keys and values are known, and what attention over them gives, in NumPy alone."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tierax.pallas_kernels.batch import RaggedBatch

LAYERS, LAYER = 2, 1
POISON = 1e30
"""In every place that no row may see: pools start as zeros and stale KV is finite, but it may be anything."""


class Shape(NamedTuple):
    """What a compiled program depends on."""

    tokens: int
    rows: int
    pages_per_row: int
    page_size: int
    heads: int
    kv_heads: int
    head_dim: int
    soft_cap: float = 0.0


class Mix(NamedTuple):
    q: np.ndarray
    pool: np.ndarray
    batch: RaggedBatch
    k: list[np.ndarray]
    v: list[np.ndarray]


def make_mix(rng: np.random.Generator, shape: Shape, counts: list[int], contexts: list[int]) -> Mix:
    """Rows of `counts[i]` tokens after `contexts[i]` earlier ones; those of several tokens come first."""
    pages = shape.rows * shape.pages_per_row
    pool = np.full(
        (pages + 1, LAYERS, shape.page_size, shape.kv_heads, 2 * shape.head_dim), POISON, np.float32
    )
    free = rng.permutation(pages)
    q_starts, kv_lens = np.zeros(shape.rows + 1, np.int32), np.zeros(shape.rows, np.int32)
    table = np.zeros((shape.rows, shape.pages_per_row), np.int32)
    keys, values = [], []
    for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        length = context + count
        used, free = np.split(free, [-(-length // shape.page_size)])
        table[row, : len(used)] = used
        k, v = rng.standard_normal((2, length, shape.kv_heads, shape.head_dim)).astype(np.float32)
        positions = np.arange(length)
        pool[used[positions // shape.page_size], LAYER, positions % shape.page_size] = np.concatenate(
            [k, v], -1
        )
        q_starts[row + 1 :] = q_starts[row] + count
        kv_lens[row] = length
        keys.append(k)
        values.append(v)
    # What stands in padded entries is nobody's business.
    kv_lens[len(counts) :] = rng.integers(0, 100)
    num_chunks = sum(count > 1 for count in counts)
    assert all(count > 1 for count in counts[:num_chunks])
    q = rng.standard_normal((shape.tokens, shape.heads, shape.head_dim)).astype(np.float32)
    batch = RaggedBatch(
        *map(jnp.asarray, (q_starts, kv_lens, table)),
        num_chunks=jnp.int32(num_chunks),
        num_rows=jnp.int32(len(counts)),
    )
    return Mix(q, pool, batch, keys, values)


def random_mix(rng: np.random.Generator, shape: Shape) -> Mix:
    """Of any number of rows, chunks and contexts that the shape has room for."""
    most = shape.pages_per_row * shape.page_size
    rows = int(rng.integers(1, shape.rows + 1))
    spare = shape.tokens - rows
    counts = []
    for _ in range(rows):
        extra = int(rng.integers(0, min(spare, most - 1) + 1)) if rng.random() < 0.6 else 0
        counts.append(1 + extra)
        spare -= extra
    counts.sort(key=lambda count: count == 1)
    contexts = [int(rng.integers(0, most - count + 1)) if rng.random() < 0.8 else 0 for count in counts]
    return make_mix(rng, shape, counts, contexts)


def plain(mix: Mix, shape: Shape, window: int, scale: float | None = None) -> list[np.ndarray]:
    """The outputs of each row, one query and head at a time, in float64."""
    scale = shape.head_dim**-0.5 if scale is None else scale
    starts = np.asarray(mix.batch.q_starts)
    outputs = []
    for row, (k, v) in enumerate(zip(mix.k, mix.v, strict=True)):
        start, end = starts[row], starts[row + 1]
        out = np.empty((end - start, shape.heads, shape.head_dim))
        for index, token in enumerate(range(start, end)):
            position = len(k) - (end - start) + index
            first = max(0, position + 1 - window) if window else 0
            for head in range(shape.heads):
                kv = head // (shape.heads // shape.kv_heads)
                scores = k[first : position + 1, kv].astype(np.float64) @ mix.q[token, head] * scale
                if shape.soft_cap:
                    scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
                weights = np.exp(scores - scores.max())
                out[index, head] = weights @ v[first : position + 1, kv] / weights.sum()
        outputs.append(out)
    return outputs


def assert_close(actual: jax.Array, mix: Mix, expected: list[np.ndarray], tolerance: float = 2e-5) -> None:
    """Of each row's outputs alone: those of padding are nobody's business."""
    starts = np.asarray(mix.batch.q_starts)
    for row, out in enumerate(expected):
        np.testing.assert_allclose(
            np.asarray(actual, np.float32)[starts[row] : starts[row + 1]],
            out,
            atol=tolerance,
            rtol=tolerance,
            err_msg=f"row {row}",
        )
