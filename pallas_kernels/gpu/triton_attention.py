"""Ragged paged attention in Pallas for Triton: chunks by one kernel, decodes by a second and a third.

A program of the chunk kernel owns a tile of query tokens and a KV head. Decodes are cut into pieces of about equal
length, whatever the lengths of their contexts, each a program's (flash-decoding; Dao et al., 2023), and put together
by the third kernel. All read pages where they are, and fold them into an online softmax (Milakov and Gimelshein, 2018;
Dao et al., 2022). Everything is indexed as flat rows of `[rows, width]`; whatever is no power of two is masked.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from .. import xla
from ..batch import RaggedBatch
from ..pages import PoolShape
from .triton_blocks import Blocks, padded_width, power_of_two
from .triton_softmax import LOWEST, Geometry, fold_pages, load_rows, store_rows

_PARTS = 16
"""Pieces of a row that the joining kernel takes in at a time."""


def attend(
    q_thd: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    blocks: Blocks,
    window: jax.Array | int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `kernels.Attend`. interpret: runs on any platform, slowly."""
    tokens, heads, head_dim = q_thd.shape
    shape = PoolShape.of(pool)
    if _out_of_reach(pool):
        return xla.attend(q_thd, pool, layer, batch, window=window, soft_cap=soft_cap, scale=scale)
    wide = jnp.float32 in (q_thd.dtype, pool.dtype)
    geometry = Geometry(
        layers=shape.layers,
        page_size=shape.page_size,
        kv_heads=shape.kv_heads,
        group=heads // shape.kv_heads,
        head_dim=head_dim,
        width=padded_width(head_dim),
        quantized=shape.quantized,
        table_width=batch.page_table.shape[1],
        operand=jnp.dtype(jnp.float32 if wide else jnp.bfloat16),
        soft_cap=soft_cap,
        scale=head_dim**-0.5 if scale is None else scale,
    )
    scalars = jnp.stack(
        [jnp.asarray(x, jnp.int32) for x in (layer, window, batch.num_chunks, batch.num_rows)]
    )
    inputs = (
        scalars,
        batch.q_starts,
        batch.kv_lens,
        batch.page_table.reshape(-1),
        q_thd.reshape(-1, head_dim),
        pool.reshape(-1, shape.row_width),
    )
    # Padding is to be finite, and no kernel writes it.
    out = jnp.zeros((tokens * heads, head_dim), q_thd.dtype)
    if tokens > 1:
        out = _attend_chunks(inputs, out, geometry, blocks, interpret)
    return _attend_decodes(inputs, out, geometry, blocks, interpret).reshape(q_thd.shape)


def _out_of_reach(pool: jax.Array) -> bool:
    """Whether an 8-bit pool has a size for which jax's lowering counts in 32 bits, signed, what needs 33."""
    return pool.dtype == jnp.uint8 and 2**31 < pool.size <= 2**32


def _attend_chunks(
    inputs: tuple, out: jax.Array, geometry: Geometry, blocks: Blocks, interpret: bool
) -> jax.Array:
    tokens = out.shape[0] // (geometry.kv_heads * geometry.group)
    padded_group = power_of_two(geometry.group)
    queries = max(blocks.chunk_queries, padded_group)
    tiles = pl.cdiv(tokens, queries // padded_group)
    call = _call(
        partial(_chunk_kernel, geometry=geometry, queries=queries, block=blocks.chunk_kv),
        grid=(geometry.kv_heads, tiles),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        warps=blocks.chunk_warps,
        stages=blocks.chunk_stages,
        input_output_aliases={len(inputs): 0},
        interpret=interpret,
        name="attend_chunks",
    )
    return call(*inputs, out)


def _attend_decodes(
    inputs: tuple, out: jax.Array, geometry: Geometry, blocks: Blocks, interpret: bool
) -> jax.Array:
    rows, heads = inputs[2].shape[0], geometry.kv_heads * geometry.group
    pieces = rows + blocks.decode_pieces
    mixed, tops = _call(
        partial(_decode_kernel, geometry=geometry, pieces=pieces, block=blocks.decode_kv),
        grid=(geometry.kv_heads, pieces),
        out_shape=(
            jax.ShapeDtypeStruct((pieces * heads, geometry.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((pieces * heads,), jnp.float32),
        ),
        warps=blocks.decode_warps,
        stages=blocks.decode_stages,
        interpret=interpret,
        name="attend_decodes",
    )(*inputs)
    inputs = (*inputs[:3], mixed, tops, out)
    return _call(
        partial(_join_kernel, geometry=geometry, pieces=pieces, block=blocks.decode_kv),
        grid=(heads, rows),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        warps=1,
        stages=1,
        input_output_aliases={len(inputs) - 1: 0},
        interpret=interpret,
        name="join_decodes",
    )(*inputs)


def _call(kernel: Any, *, warps: int, stages: int, **options: Any) -> Any:
    return pl.pallas_call(
        kernel, compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages), **options
    )


def _chunk_kernel(
    scalars, starts, lens, table, q, pool, _, out, *, geometry: Geometry, queries: int, block: int
):
    """One KV head and the tokens of one tile, of the chunks that have some there."""
    kv_head, padded_group = pl.program_id(0), power_of_two(geometry.group)
    window, num_chunks = scalars[1], scalars[2]
    tile = queries // padded_group
    # The last tiles of a chunk see most and take longest: they start first.
    tile_start = (pl.num_programs(1) - 1 - pl.program_id(1)) * tile
    index = jnp.arange(queries)
    token, member = tile_start + index // padded_group, index % padded_group
    q_row = (token * geometry.kv_heads + kv_head) * geometry.group + member
    known = (member < geometry.group) & (q_row < q.shape[0])
    queries_md = load_rows(q, q_row, known, geometry)

    num_rows = lens.shape[0]
    row = jnp.arange(power_of_two(num_rows))
    chunk = row < jnp.minimum(num_chunks, num_rows)
    ends = pltriton.load(starts.at[jnp.minimum(row + 1, num_rows)], mask=chunk, other=0)
    begins = pltriton.load(starts.at[jnp.minimum(row, num_rows)], mask=chunk, other=0)
    first_row = jnp.sum((chunk & (ends <= tile_start)).astype(jnp.int32))
    last_row = jnp.sum((chunk & (begins < tile_start + tile)).astype(jnp.int32))

    def attend_row(row, _):
        begin, end = starts[row], starts[row + 1]
        offset = lens[row] - end
        position = offset + token
        last = offset + jnp.minimum(tile_start + tile, end)
        first = _first_visible(offset + jnp.maximum(tile_start, begin), window)
        mixed, _ = fold_pages(
            queries_md,
            position,
            (first, last),
            window,
            scalars[0],
            row,
            kv_head,
            table,
            pool,
            geometry,
            block,
        )
        store_rows(out, q_row, known & (token >= begin) & (token < end), mixed, geometry)
        return ()

    jax.lax.fori_loop(first_row, last_row, attend_row, ())


def _decode_kernel(
    scalars, starts, lens, table, q, pool, mixed_out, tops_out, *, geometry: Geometry, pieces: int, block: int
):
    """One KV head and one piece of a row's context."""
    kv_head, piece = pl.program_id(0), pl.program_id(1)
    window = scalars[1]
    plan = _Pieces(scalars, lens, pieces, block)
    row, part = plan.row_of(piece)
    kv_len = jnp.where(piece < plan.used, lens[row], 0)
    first = _first_visible(kv_len - 1, window)
    begin = (first // block + part * plan.length) * block
    end = jnp.minimum(begin + plan.length * block, kv_len)
    member = jnp.arange(max(16, power_of_two(geometry.group)))
    known = member < geometry.group
    head = kv_head * geometry.group + member
    heads = geometry.kv_heads * geometry.group
    queries_md = load_rows(q, starts[row] * heads + head, known & (piece < plan.used), geometry)
    position = jnp.full(member.shape, kv_len - 1)
    bounds = jnp.maximum(begin, first), end
    mixed, top = fold_pages(
        queries_md, position, bounds, window, scalars[0], row, kv_head, table, pool, geometry, block
    )
    used = known & (piece < plan.used)
    store_rows(mixed_out, piece * heads + head, used, mixed, geometry)
    pltriton.store(tops_out.at[piece * heads + head], top, mask=used)


def _join_kernel(scalars, starts, lens, mixed, tops, _, out, *, geometry: Geometry, pieces: int, block: int):
    """One head of one row: the mean of its pieces, weighted by the sums of their weights."""
    head, row = pl.program_id(0), pl.program_id(1)
    heads = geometry.kv_heads * geometry.group
    first, count = _Pieces(scalars, lens, pieces, block).pieces_of(row)

    def take(step, carry):
        top, total, sums = carry
        part = step * _PARTS + jnp.arange(_PARTS)
        index = (first + part) * heads + head
        part_tops = pltriton.load(tops.at[index], mask=part < count, other=LOWEST)
        new_top = jnp.maximum(top, jnp.max(part_tops))
        weights = jnp.where(part < count, jnp.exp2(part_tops - new_top), 0.0)
        values = load_rows(mixed, index, part < count, geometry)
        keep = jnp.exp2(top - new_top)
        sums = sums * keep + jnp.sum(values * weights[:, None], axis=0)
        return new_top, total * keep + jnp.sum(weights), sums

    empty = (jnp.float32(LOWEST), jnp.float32(0), jnp.zeros(geometry.width, jnp.float32))
    _, total, sums = jax.lax.fori_loop(0, pl.cdiv(count, _PARTS), take, empty)
    column = jnp.arange(geometry.width)
    result = sums / jnp.where(total > 0, total, 1.0)
    pltriton.store(
        out.at[starts[row] * heads + head, column],
        result.astype(out.dtype),
        mask=(column < geometry.head_dim) & (count > 0),
    )


class _Pieces:
    """How the contexts of all decodes are cut: each program works this out for itself, from the lengths.

    Pieces have `length` blocks, the last of a row at most that, where `length` is the least for which
    sum(ceil(blocks / length)) <= sum(blocks) / length + rows stays within the number of pieces for sure.
    """

    def __init__(self, scalars, lens, pieces: int, block: int) -> None:
        window, num_chunks, num_rows = scalars[1], scalars[2], scalars[3]
        row = jnp.arange(power_of_two(lens.shape[0]))
        decodes = (row >= num_chunks) & (row < num_rows)
        kv_len = pltriton.load(lens.at[jnp.minimum(row, lens.shape[0] - 1)], mask=decodes, other=0)
        blocks = jnp.where(decodes, pl.cdiv(kv_len, block) - _first_visible(kv_len - 1, window) // block, 0)
        self.length = jnp.maximum(pl.cdiv(jnp.sum(blocks), pieces - lens.shape[0]), 1)
        self._row = row
        self._counts = pl.cdiv(blocks, self.length)
        self._ends = jnp.cumsum(self._counts)
        self.used = jnp.sum(self._counts)

    def row_of(self, piece):
        """Its row, and its number among that row's pieces. Row 0 for one that is not in use."""
        row = jnp.sum((self._ends <= piece).astype(jnp.int32))
        row = jnp.where(piece < self.used, row, 0)
        first, _ = self.pieces_of(row)
        return row, piece - first

    def pieces_of(self, row):
        """The first piece of a row, and how many it has."""
        this = self._row == row
        count = jnp.sum(jnp.where(this, self._counts, 0))
        return jnp.sum(jnp.where(this, self._ends, 0)) - count, count


def _first_visible(position, window):
    """The first position that `position` may see."""
    return jnp.where(window > 0, jnp.maximum(position + 1 - window, 0), 0)
