"""Attention of prefill chunks on Hopper tensor cores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..batch import RaggedBatch
from .blocks import COMPUTE_REGISTERS, COPY_REGISTERS, ROWS
from .hopper_flash import (
    Pages,
    Plan,
    Ref,
    Softmax,
    copy_blocks,
    fold_block,
    row_index,
    visible_only,
    wait_until_read,
)


def attend_chunks(
    q_thd: jax.Array,
    pool_nkd: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    window: jax.Array,
    plan: Plan,
    interpret: Any = None,
) -> jax.Array:
    """Outputs `[T, heads, head_dim]` of the tokens of rows `[0, num_chunks)`; the rest is undefined.

    A thread block serves one head and one tile of the flat token axis. Chunks follow each other there, so a tile may
    hold tokens of several: it goes through the rows it meets, one after the other, and a token sees its own row's KV only.
    That bounds the grid by T alone, however many rows there are. pool_nkd: see `Pages`; layer, window: i32 scalars.
    """
    tokens, heads, head_dim = q_thd.shape
    blocks = plan.blocks
    tile = blocks.compute_warpgroups * ROWS
    tiles = -(-tokens // tile)
    q_thd = jnp.pad(q_thd, ((0, tiles * tile - tokens), (0, 0), (0, 0)))
    rows = batch.kv_lens.shape[0]
    group = heads // pool_nkd.shape[1]

    is_chunk = jnp.arange(rows) < batch.num_chunks
    first_token = jnp.arange(tiles)[:, None] * tile
    ends_before = is_chunk & (batch.q_starts[1:] <= first_token)
    starts_before_end = is_chunk & (batch.q_starts[:-1] < first_token + tile)
    tile_rows = jnp.stack([ends_before.sum(1), starts_before_end.sum(1)]).astype(jnp.int32)
    scalars = jnp.stack([layer, window])

    def body(
        q_ref: Ref,
        pool_ref: Ref,
        table_ref: Ref,
        q_starts_ref: Ref,
        kv_lens_ref: Ref,
        tile_rows_ref: Ref,
        scalars_ref: Ref,
        out_ref: Ref,
        q_smem: Ref,
        q_filled: Ref,
        **ring: Ref,
    ) -> None:
        head, tile_index = lax.axis_index("head"), lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        first_row, stop_row = tile_rows_ref[0, tile_index], tile_rows_ref[1, tile_index]
        layer, window = scalars_ref[0], scalars_ref[1]
        tile_start = tile_index * tile

        def each_row(fold: Any, state: Any) -> Any:
            """`fold(row, start, end, offset, first_block, stop_block, state)` over the tile's rows; `offset` is the
            position of token 0, were it of that row; the blocks are those that any of the tile's tokens sees."""

            def one(row: jax.Array, state: Any) -> Any:
                start, end = q_starts_ref[row], q_starts_ref[row + 1]
                offset = kv_lens_ref[row] - end
                stop = jnp.minimum(end, tile_start + tile) + offset
                first = jnp.maximum(start, tile_start) + offset + 1 - window
                first = jnp.where(window > 0, jnp.maximum(first, 0), 0)
                first_block = lax.div(first, blocks.kv_tokens)
                stop_block = lax.div(stop + blocks.kv_tokens - 1, blocks.kv_tokens)
                return fold(row, start, end, offset, first_block, stop_block, state)

            return lax.fori_loop(first_row, stop_row, one, state)

        @pl.when((first_row < stop_row) & (warpgroup == blocks.compute_warpgroups))
        def _copy() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            pages = Pages(pool_ref, table_ref, layer, lax.div(head, group))

            def copy(row, start, end, offset, first_block, stop_block, copied):
                return copy_blocks(plan, pages, ring, row, offset + end, first_block, stop_block, copied)

            wait_until_read(plan, ring, each_row(copy, jnp.int32(0)))

        @pl.when((first_row < stop_row) & (warpgroup < blocks.compute_warpgroups))
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            own_start = tile_start + warpgroup * ROWS
            own_q = q_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(own_start, ROWS), head], own_q, q_filled.at[warpgroup])
            plgpu.barrier_wait(q_filled.at[warpgroup])
            token = row_index(plan) + own_start

            def fold(row, start, end, offset, first_block, stop_block, state):
                # A token of another row stops before its first position: it sees nothing.
                position = token + offset
                own = (token >= start) & (token < end)
                stop = jnp.where(own, position + 1, 0)
                first = jnp.where(window > 0, position + 1 - window, 0)
                all_own = (start <= own_start) & (own_start + ROWS <= end)
                # Positions that every one of the warpgroup's tokens sees.
                seen_from = jnp.where(window > 0, own_start + ROWS + offset - window, 0)
                seen_to = jnp.where(all_own, own_start + offset + 1, 0)

                def block(b, state):
                    folded, softmax = state
                    place = lax.rem(folded, blocks.stages)
                    block_start = b * blocks.kv_tokens
                    masks = (block_start < seen_from) | (block_start + blocks.kv_tokens > seen_to)
                    mask = visible_only(plan, b, first, stop)
                    softmax = fold_block(plan, own_q, ring, place, softmax, mask, masks)
                    return folded + 1, softmax

                return lax.fori_loop(first_block, stop_block, block, state)

            _, softmax = each_row(fold, (jnp.int32(0), Softmax.empty(plan)))
            own_q[...] = softmax.result().astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_q, out_ref.at[pl.ds(own_start, ROWS), head])
            plgpu.wait_smem_to_gmem(0)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q_thd.shape, q_thd.dtype),
        scratch_types={
            "q_smem": plan.tiled(blocks.compute_warpgroups, ROWS, head_dim),
            "q_filled": plgpu.Barrier(num_barriers=blocks.compute_warpgroups),
            **plan.ring(freed_by=blocks.compute_warpgroups),
        },
        grid=(tiles, heads),
        grid_names=("tile", "head"),
        num_threads=blocks.compute_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="hopper_prefill",
        compiler_params=plan.compiler_params(),
        interpret=interpret,
    )(q_thd, pool_nkd, batch.page_table, batch.q_starts, batch.kv_lens, tile_rows, scalars)
    return out[:tokens]
