"""Runs tiny models whole and split over eight devices of the host, and prints how far the two are apart.

A program of its own (`python -m helpers.sharded_forward CASE...`, CASE = family:devices:axes:kv[:weights]): the number of devices
is fixed when jax starts.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from helpers.tiny_engine import TinyModel
from helpers.tiny_models import write_tiny_checkpoint
from tierax.models.sharding import ShardedDecoder, ShardingRules, Shares
from tierax.models.source import resolve_model
from tierax.models.transformer import Decoder, StepTokens
from tierax.models.weights.loader import load_params
from tierax.pallas_kernels import xla
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.experts import looped_linear
from tierax.pallas_kernels.kernels import Kernels
from tierax.pallas_kernels.pages import PoolShape

PAGE_SIZE = 4
PAGES = 12
KERNELS = Kernels("xla", xla.attend, xla.write_kv, xla.linear, looped_linear)
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def steps() -> list[tuple[StepTokens, RaggedBatch]]:
    """Two steps over four sequences: prefill of 9 and 4 tokens; then a chunk of 5 more, and two decodes."""
    rng = np.random.default_rng(0)
    table = rng.permutation(PAGES).astype(np.int32).reshape(3, 4)
    prefill = _step(rng, table, [(0, 0, 9), (1, 0, 4)], chunks=2)
    mixed = _step(rng, table, [(2, 0, 5), (0, 9, 1), (1, 4, 1)], chunks=1)
    return [prefill, mixed]


def _step(rng: np.random.Generator, table: np.ndarray, rows: list[tuple[int, int, int]], chunks: int):
    """rows: (sequence, first position, tokens)."""
    width = 16
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
    sequence = np.repeat([row[0] for row in rows], [row[2] for row in rows])
    slots = PAGES * PAGE_SIZE + np.arange(width) % PAGE_SIZE
    slots[: len(positions)] = table[sequence, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    pad = (0, width - len(positions))
    tokens = [rng.integers(0, 256, width), np.pad(positions, pad), slots]
    starts = np.cumsum([0, *[row[2] for row in rows]])
    # One program serves both steps: as many rows as there are sequences.
    pad = (0, len(table) - len(rows))
    batch = RaggedBatch(
        jnp.asarray(np.pad(starts, pad, "edge"), jnp.int32),
        jnp.asarray(np.pad([start + count for _, start, count in rows], pad), jnp.int32),
        jnp.asarray(np.pad(table[[row[0] for row in rows]], (pad, (0, 0)))),
        num_chunks=jnp.int32(chunks),
        num_rows=jnp.int32(len(rows)),
    )
    return StepTokens(*(jnp.asarray(array, jnp.int32) for array in tokens)), batch


class Run(NamedTuple):
    """What both steps come to."""

    logits: np.ndarray
    """f32 `[tokens, V]` of every real token."""
    pool: jax.Array
    compiled: jax.stages.Compiled


def run(decoder: Decoder | ShardedDecoder, params: Any, pool: jax.Array) -> Run:
    """Runs both steps on a pool, which is used up."""
    lowered = jax.jit(decoder.forward, donate_argnums=1).lower(params, pool, *steps()[0])
    forward, logits = lowered.compile(), jax.jit(decoder.logits)
    outs = []
    for tokens, batch in steps():
        hidden, pool = forward(params, pool, tokens, batch)
        outs.append(np.asarray(logits(params, hidden))[: int(batch.q_starts[batch.num_rows])])
    return Run(np.concatenate(outs), pool, forward)


def compare(family: str, devices: int, axes: str, kv: str, weights: str = "none") -> dict[str, Any]:
    """What splitting one model changes: values, and the program. axes: logical ones that are split; kv: f32 or fp8;
    weights: their quantisation, as the loader calls it."""
    model = TinyModel(family, stacked=kv == "f32", quantization=weights)
    config, dtype = model.config, jnp.dtype(jnp.float32)
    kv_dtype, quantized = (jnp.uint8, True) if kv == "fp8" else (jnp.float32, False)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    rules = ShardingRules(*("tp" if name in axes.split("+") else None for name in ShardingRules._fields))
    shares = Shares(config, mesh, rules)
    sharded = ShardedDecoder(shares, dtype, KERNELS)
    whole_shape = PoolShape(
        PAGES, config.num_layers, PAGE_SIZE, config.num_kv_heads, config.head_dim, quantized
    )
    whole_pool = jnp.zeros(whole_shape.array, kv_dtype)
    split_pool = jax.device_put(
        jnp.zeros(shares.pool_array(PAGES, PAGE_SIZE, quantized=quantized), kv_dtype),
        NamedSharding(mesh, shares.pool_spec),
    )
    expected = run(Decoder(config, dtype, KERNELS), model.params, whole_pool)
    placed = shares.place(shares.rearranged(model.params))
    actual = run(sharded, placed, split_pool)
    memory = actual.compiled.memory_analysis()
    assert memory is not None
    return {
        "difference": float(np.abs(actual.logits - expected.logits).max()),
        "loaded": _loaded(family, shares, kv == "f32", weights, placed),
        "spread": float(expected.logits.std()),
        "kv_difference": _kv_difference(shares, expected.pool, actual.pool),
        "collectives": Counter(COLLECTIVE.findall(actual.compiled.as_text() or "")),
        "aliased": memory.alias_size_in_bytes,
        "pool_bytes_per_device": actual.pool.addressable_shards[0].data.nbytes,
        "pool_bytes": expected.pool.nbytes,
    }


def _loaded(family: str, shares: Shares, stacked: bool, weights: str, placed: Any) -> bool:
    """Whether a loader that is told of the shares gives each device what it would get from the whole."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_checkpoint(directory, family)
        source = resolve_model(directory)
        params = load_params(source, source.config, quantization=weights, stacked=stacked, shares=shares)
    pairs = zip(*map(jax.tree.leaves, (params, placed)), strict=True)
    return all(
        one.sharding == other.sharding
        and np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
        for one, other in pairs
    )


def _kv_difference(shares: Shares, whole: jax.Array, split: jax.Array) -> float:
    """Largest difference between what a device stores for a head and the head's KV in the whole pool."""
    before = PoolShape.of(whole)
    rows = (*before.array[:3], before.kv_heads, before.row_width)
    heads = np.asarray(whole, np.float32).reshape(rows)[:-1]
    split_heads = np.asarray(split, np.float32).reshape(*rows[:3], -1, rows[-1])[:-1]
    # In a pool that is not split, `kv_heads` lists every head once.
    held = shares.kv_heads.reshape(-1)
    real = np.flatnonzero(held < before.kv_heads)
    return float(np.abs(split_heads[..., real, :] - heads[..., held[real], :]).max())


if __name__ == "__main__":
    cases = [case.split(":") for case in sys.argv[1:]]
    print(json.dumps([compare(family, int(devices), *rest) for family, devices, *rest in cases]))
