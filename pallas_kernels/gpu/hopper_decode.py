"""Attention of single tokens on Hopper: each row's KV is split between thread blocks (as in Flash-Decoding; Dao et al.,
2023), and what they found is combined by XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..batch import RaggedBatch
from .blocks import COMPUTE_REGISTERS, COPY_REGISTERS, ROWS, decode_splits
from .hopper_flash import Pages, Plan, Ref, Softmax, copy_blocks, fold_block, visible_only, wait_until_read


def attend_decodes(
    q_thd: jax.Array,
    pool_nkd: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    window: jax.Array,
    plan: Plan,
    interpret: Any = None,
) -> jax.Array:
    """Outputs f32 `[S, heads, head_dim]` of the first token of rows `[num_chunks, num_rows)`; the rest is undefined.

    A thread block serves one row, one KV head and one split of its KV blocks, in which its computing warpgroups take
    turns. The matrix product's 64 rows are the query heads of the group and whatever follows them in memory: a decode
    waits for KV, not for the tensor cores. pool_nkd: see `Pages`; layer, window: i32 scalars.
    """
    tokens, heads, head_dim = q_thd.shape
    kv_heads = pool_nkd.shape[1]
    group = heads // kv_heads
    blocks = plan.blocks
    rows, width = batch.page_table.shape
    splits = decode_splits(rows, kv_heads, width * plan.page_size, blocks)
    # Behind the last group there are 64 rows to copy, in whole tiles of 8.
    q_rows = jnp.pad(q_thd.reshape(-1, head_dim), ((0, ROWS + -tokens * heads % 8), (0, 0)))
    scalars = jnp.stack([layer, window, batch.num_chunks, batch.num_rows])

    def body(
        q_ref: Ref,
        pool_ref: Ref,
        table_ref: Ref,
        q_starts_ref: Ref,
        kv_lens_ref: Ref,
        scalars_ref: Ref,
        mixed_ref: Ref,
        weight_ref: Ref,
        q_smem: Ref,
        q_filled: Ref,
        mixed_smem: Ref,
        weight_smem: Ref,
        **ring: Ref,
    ) -> None:
        row, kv_head, split = (lax.axis_index(name) for name in ("row", "kv_head", "split"))
        warpgroup = lax.axis_index("warpgroup")
        layer, window = scalars_ref[0], scalars_ref[1]
        is_decode = (row >= scalars_ref[2]) & (row < scalars_ref[3])
        stop = kv_lens_ref[row]
        first = jnp.where(window > 0, jnp.maximum(stop - window, 0), 0)
        first_block = lax.div(first, blocks.kv_tokens)
        stop_block = lax.div(stop + blocks.kv_tokens - 1, blocks.kv_tokens)
        split_blocks = lax.div(stop_block - first_block + splits - 1, splits)
        own_first = first_block + split * split_blocks
        own_stop = jnp.minimum(own_first + split_blocks, stop_block)

        @pl.when(is_decode & (warpgroup == blocks.compute_warpgroups))
        def _copy() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            first_head = q_starts_ref[row] * heads + kv_head * group
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(first_head, ROWS)], q_smem, q_filled)
            pages = Pages(pool_ref, table_ref, layer, kv_head)
            copied = copy_blocks(plan, pages, ring, row, stop, own_first, own_stop, jnp.int32(0))
            wait_until_read(plan, ring, copied)

        @pl.when(is_decode & (warpgroup < blocks.compute_warpgroups))
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_wait(q_filled)

            def turn(i, softmax):
                index = i * blocks.compute_warpgroups + warpgroup
                block = own_first + index
                place = lax.rem(index, blocks.stages)
                block_start = block * blocks.kv_tokens
                masks = (block_start < first) | (block_start + blocks.kv_tokens > stop)
                mask = visible_only(plan, block, first, stop)
                return fold_block(plan, q_smem, ring, place, softmax, mask, masks)

            mine = jnp.maximum(own_stop - own_first - warpgroup, 0) + blocks.compute_warpgroups - 1
            softmax = lax.fori_loop(0, lax.div(mine, blocks.compute_warpgroups), turn, Softmax.empty(plan))
            own_weight, own_mixed = weight_smem.at[warpgroup], mixed_smem.at[warpgroup]
            own_weight[...] = softmax.log_weight()
            own_mixed[...] = softmax.result()
            plgpu.commit_smem()
            share = split * blocks.compute_warpgroups + warpgroup
            plgpu.copy_smem_to_gmem(own_weight, weight_ref.at[row, kv_head, share])
            plgpu.copy_smem_to_gmem(own_mixed.at[pl.ds(0, group)], mixed_ref.at[row, kv_head, share])
            plgpu.wait_smem_to_gmem(0)

    shares = splits * blocks.compute_warpgroups
    mixed, log_weight = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, kv_heads, shares, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, kv_heads, shares, ROWS), jnp.float32),
        ),
        scratch_types={
            "q_smem": plan.tiled(ROWS, head_dim),
            "q_filled": plgpu.Barrier(),
            "mixed_smem": plgpu.SMEM((blocks.compute_warpgroups, ROWS, head_dim), jnp.float32),
            "weight_smem": plgpu.SMEM((blocks.compute_warpgroups, ROWS), jnp.float32),
            **plan.ring(freed_by=1),
        },
        grid=(rows, kv_heads, splits),
        grid_names=("row", "kv_head", "split"),
        num_threads=blocks.compute_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="hopper_decode",
        compiler_params=plan.compiler_params(),
        interpret=interpret,
    )(q_rows, pool_nkd, batch.page_table, batch.q_starts, batch.kv_lens, scalars)
    return combine(mixed, log_weight[..., :group]).reshape(rows, heads, head_dim)


def combine(mixed: jax.Array, log_weight: jax.Array) -> jax.Array:
    """`[S, kv_heads, group, D]` of shares `[S, kv_heads, shares, group, D]` and the powers of two they weigh."""
    weight = jnp.exp2(log_weight - log_weight.max(axis=2, keepdims=True))
    return (mixed * (weight / weight.sum(axis=2, keepdims=True))[..., None]).sum(axis=2)
