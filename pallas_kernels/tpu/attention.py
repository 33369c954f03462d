"""Ragged paged attention as a Mosaic kernel.

One program walks over the rows (see `cursor`): pages come from HBM by DMA, `buffers - 1` blocks ahead of the block that is
computed on, across the borders of tiles and rows; scores go through an online softmax in f32 (Milakov and Gimelshein,
2018). The query heads of a KV head share one pass over its keys (Ainslie et al., 2023). Decodes and prefill chunks are
two calls of the same kernel that differ in the size of a query tile.

The page table stays in HBM. Each row of it comes into scalar memory one row ahead, so that its size is bound only by the
width of two rows (`MAX_TABLE_WIDTH`). The result takes the place of the queries: rows of padding keep what they held.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..batch import RaggedBatch
from ..pages import PoolShape
from .blocks import Blocks
from .cursor import Cursor, Rows
from .heads import HeadReader

NEG_INF = -1e30
"""Finite, so that a fully masked block leaves no NaN behind."""
LANES = 128
MAX_TABLE_WIDTH = 65_536
"""Pages per row: two rows of that width take half of the smallest scalar memory, 1 MiB."""
MAX_ROWS = 16_384
"""Rows of a batch, whose lengths and starts lie in scalar memory too."""


def attend(
    q_thd: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    window: jax.Array | int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    decode: Blocks,
    chunk: Blocks,
    vmem_bytes: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `kernels.Attend`. decode, chunk: block sizes; vmem_bytes: the compiler's limit; interpret: of `pallas_call`.

    Raises ValueError for a batch that scalar memory cannot hold.
    """
    rows, width = batch.page_table.shape
    if width > MAX_TABLE_WIDTH or rows > MAX_ROWS:
        raise ValueError(
            f"a page table of {rows} x {width}: at most {MAX_ROWS} x {MAX_TABLE_WIDTH} fit the TPU kernel"
        )
    scale = float(q_thd.shape[-1]) ** -0.5 if scale is None else scale
    call = partial(_call, pool=pool, batch=batch, layer=layer, window=window, soft_cap=soft_cap, scale=scale)
    call = partial(call, vmem_bytes=vmem_bytes, interpret=interpret)
    if q_thd.shape[0] > 1:
        q_thd = call(q_thd, first=0, end=batch.num_chunks, blocks=chunk)
    return call(q_thd, first=batch.num_chunks, end=batch.num_rows, blocks=decode)


def _call(q_thd, *, pool, batch, layer, window, soft_cap, scale, first, end, blocks, vmem_bytes, interpret):
    """Attention of the rows from `first` to `end`; all other tokens keep their queries."""
    tokens, heads, head_dim = q_thd.shape
    shape = PoolShape.of(pool)
    kv_heads, group = shape.kv_heads, heads // shape.kv_heads
    blocks = blocks._replace(q_tokens=min(blocks.q_tokens, tokens))
    block_pages, rows = blocks.pages(shape.page_size), group * blocks.q_tokens
    exact = q_thd.dtype == jnp.float32 or pool.dtype == jnp.float32
    width = head_dim if head_dim % LANES == 0 else 2 * head_dim
    static = Static(
        blocks._replace(kv_tokens=block_pages * shape.page_size),
        shape,
        group,
        jnp.dtype(jnp.float32 if exact else jnp.bfloat16),
        soft_cap,
        scale,
    )
    table = batch.page_table.reshape(batch.page_table.shape[0], 1, -1)
    table = jnp.pad(table, [(0, 0), (0, 0), (0, -table.shape[-1] % LANES)])
    scalars = jnp.stack([jnp.asarray(value, jnp.int32) for value in (first, end, layer, window)])
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    scratch = Scratch(
        table=pltpu.SMEM((2, 1, table.shape[-1]), jnp.int32),
        kv=pltpu.VMEM((blocks.buffers, static.blocks.kv_tokens, *pool.shape[3:]), pool.dtype),
        q=pltpu.VMEM((blocks.buffers, blocks.q_tokens, heads, head_dim), q_thd.dtype),
        out=pltpu.VMEM((blocks.q_tokens, heads, head_dim), q_thd.dtype),
        queries=pltpu.VMEM((kv_heads, rows, width), static.dtype if blocks.q_tokens > 1 else jnp.float32),
        mixed=pltpu.VMEM((kv_heads, rows, width), jnp.float32),
        top=pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
        total=pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
        results=pltpu.VMEM((blocks.q_tokens, heads, head_dim), jnp.float32),
        table_sems=pltpu.SemaphoreType.DMA((2,)),
        kv_sems=pltpu.SemaphoreType.DMA((blocks.buffers,)),
        q_sems=pltpu.SemaphoreType.DMA((blocks.buffers,)),
        out_sem=pltpu.SemaphoreType.DMA(()),
    )
    return pl.pallas_call(
        partial(_kernel, static),
        out_shape=jax.ShapeDtypeStruct(q_thd.shape, q_thd.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(),
            in_specs=[any_memory] * 3,
            out_specs=any_memory,
            scratch_shapes=list(scratch),
        ),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes),
        interpret=interpret,
        name=f"ragged_paged_attention_{blocks.q_tokens}",
    )(scalars, batch.q_starts, batch.kv_lens, table, q_thd, pool)


class Static(NamedTuple):
    """What a kernel is compiled for."""

    blocks: Blocks
    pool: PoolShape
    group: int
    """Query heads per KV head."""
    dtype: jnp.dtype
    """Of the operands of matrix products: f32 as soon as queries or KV are."""
    soft_cap: float
    scale: float


class Scratch(NamedTuple):
    """Memory of the kernel. N: KV tokens of a block, R: query tokens of a tile times heads per KV head."""

    table: Any
    """i32 `[2, 1, W]`: the page tables of a row and the next."""
    kv: Any
    """`[buffers, N, kv_heads, row_width]`, without the third axis for a single KV head."""
    q: Any
    """`[buffers, q_tokens, heads, head_dim]`, as in HBM."""
    out: Any
    """`[q_tokens, heads, head_dim]`, on its way to HBM."""
    queries: Any
    """`[kv_heads, R, head_dim]`, the tile's queries by KV head; twice as wide, V's half zero, where K alone is not
    a multiple of 128 lanes: a product with the whole row costs less than cutting it."""
    mixed: Any
    """f32, as `queries`: the weighted sum of values so far."""
    top: Any
    """f32 `[kv_heads, R, 1]`: the largest score so far."""
    total: Any
    """f32 `[kv_heads, R, 1]`: sum of the weights."""
    results: Any
    """f32 `[q_tokens, heads, head_dim]`."""
    table_sems: Any
    kv_sems: Any
    q_sems: Any
    out_sem: Any


def _kernel(static: Static, scalars, q_starts, kv_lens, table, q, pool, out, *scratch) -> None:
    buffers = static.blocks.buffers
    first, end, layer, window = (scalars[i] for i in range(4))
    block_pages = static.blocks.pages(static.pool.page_size)
    rows = Rows(q_starts, kv_lens, end, window, static.blocks.q_tokens, static.pool.page_size, block_pages)
    memory = Scratch(*scratch)
    fetch = _Fetch(static, rows, memory, table, q, pool, layer)

    @pl.when(first < end)
    def _():
        memory.queries[...] = jnp.zeros_like(memory.queries)
        fetch.start_table(first)
        ahead = Cursor.at(rows, first, 0, 0)
        for step in range(buffers - 1):
            ahead = fetch.advance(ahead, step)

        def walk(carry):
            step, here, ahead, written = carry
            ahead = fetch.advance(ahead, step + buffers - 1)
            fetch.wait_block(here, step)

            @pl.when(here.is_first())
            def _():
                fetch.wait_queries(here)
                _begin(static, memory, here)

            _fold(static, rows, memory, here, lax.rem(step, buffers))

            def finish():
                _copy_tokens(written, out, memory.out, 0, memory.out_sem, store=True, wait=True)
                _finish(static, memory)
                _copy_tokens(here.tokens, out, memory.out, here.token, memory.out_sem, store=True)
                return here.tokens

            written = lax.cond(here.is_last(rows), finish, lambda: written)
            return step + 1, here.next(rows), ahead, written

        start = (jnp.int32(0), Cursor.at(rows, first, 0, 0), ahead, jnp.int32(0))
        *_, written = lax.while_loop(lambda carry: carry[1].row < end, walk, start)
        _copy_tokens(written, out, memory.out, 0, memory.out_sem, store=True, wait=True)


class _Fetch(NamedTuple):
    """Brings page tables, queries and pages in. Whatever is started is waited for exactly once."""

    static: Static
    rows: Rows
    memory: Scratch
    table: jax.Ref
    q: jax.Ref
    pool: jax.Ref
    layer: jax.Array

    def start_table(self, row: jax.Array) -> None:
        self._table_copy(row).start()

    def _table_copy(self, row: jax.Array):
        slot = lax.rem(row, 2)
        return pltpu.make_async_copy(
            self.table.at[row], self.memory.table.at[slot], self.memory.table_sems.at[slot]
        )

    def advance(self, at: Cursor, step: jax.Array | int) -> Cursor:
        """Starts the copies of the step that `at` names, unless the walk has ended; returns the next one."""

        def start() -> Cursor:
            @pl.when(at.is_first() & (at.tile == 0))
            def _():
                self._table_copy(at.row).wait()

                @pl.when(at.row + 1 < self.rows.end)
                def _():
                    self.start_table(at.row + 1)

            @pl.when(at.is_first())
            def _():
                self._queries(at)

            slot, first = lax.rem(step, self.static.blocks.buffers), at.page(self.rows)

            def start_page(i, _):
                page = self.memory.table[lax.rem(at.row, 2), 0, first + i]
                self._page_copy(page, slot, i).start()

            lax.fori_loop(0, at.pages(self.rows), start_page, None)
            return at.next(self.rows)

        return lax.cond(at.row < self.rows.end, start, lambda: at)

    def wait_block(self, at: Cursor, step: jax.Array) -> None:
        slot = lax.rem(step, self.static.blocks.buffers)
        lax.fori_loop(0, at.pages(self.rows), lambda i, _: self._page_copy(0, slot, i).wait(), None)

    def wait_queries(self, at: Cursor) -> None:
        self._queries(at, wait=True)

    def _queries(self, at: Cursor, wait: bool = False) -> None:
        slot = lax.rem(at.unit, self.static.blocks.buffers)
        _copy_tokens(
            at.tokens, self.q, self.memory.q.at[slot], at.token, self.memory.q_sems.at[slot], wait=wait
        )

    def _page_copy(self, page: jax.Array | int, slot: jax.Array, i: jax.Array):
        size = self.static.pool.page_size
        place = pl.ds(pl.multiple_of(i * size, size), size)
        return pltpu.make_async_copy(
            self.pool.at[page, self.layer], self.memory.kv.at[slot, place], self.memory.kv_sems.at[slot]
        )


def _copy_tokens(count, outer, inner, token, sem, *, store: bool = False, wait: bool = False) -> None:
    """Copies tokens from `token` on of an array in HBM to the start of one in VMEM, or stores them there.

    A DMA's size is static, so that `count` tokens go in pieces, one for each of its bits.
    """
    done = 0
    for bit in reversed(range(inner.shape[0].bit_length())):
        size = 1 << bit
        source, target = outer.at[pl.ds(token + done, size)], inner.at[pl.ds(done, size)]
        copy = pltpu.make_async_copy(*((target, source) if store else (source, target)), sem)
        pl.when(count & size != 0)(copy.wait if wait else copy.start)
        done = done + (count & size)


def _begin(static: Static, memory: Scratch, at: Cursor) -> None:
    """Lays the tile's queries out by KV head, and empties the softmax."""
    slot, tokens, group = lax.rem(at.unit, static.blocks.buffers), static.blocks.q_tokens, static.group
    head_dim = static.pool.head_dim
    for kv_head in range(static.pool.kv_heads):
        first = kv_head * group
        if tokens == 1:
            q_hd = memory.q[slot, 0].astype(jnp.float32)
            memory.queries[kv_head, :, :head_dim] = q_hd[first : first + group]
            continue
        for i in range(group):
            q_td = memory.q[slot, :, first + i, :].astype(memory.queries.dtype)
            memory.queries[kv_head, i * tokens : (i + 1) * tokens, :head_dim] = q_td
    memory.mixed[...] = jnp.zeros_like(memory.mixed)
    memory.top[...] = jnp.full_like(memory.top, NEG_INF)
    memory.total[...] = jnp.zeros_like(memory.total)


def _fold(static: Static, rows: Rows, memory: Scratch, at: Cursor, slot: jax.Array) -> None:
    """Takes one block of KV into the softmax of each KV head."""
    tokens, head_dim = static.blocks.kv_tokens, static.pool.head_dim
    start = at.page(rows) * rows.page_size
    seen = at.position + at.tokens - start
    reader = HeadReader(static.pool, memory.kv, slot, seen)
    shape = (static.group * static.blocks.q_tokens, tokens)
    # Rows are ordered by head, then by token.
    q_index = lax.broadcasted_iota(jnp.int32, shape, 0) % static.blocks.q_tokens
    behind = lax.broadcasted_iota(jnp.int32, shape, 1) - q_index + (start - at.position)
    window = jnp.where(rows.window > 0, rows.window, jnp.iinfo(jnp.int32).max)
    visible = (behind <= 0) & (behind > -window)
    precision = lax.Precision.HIGHEST if static.dtype == jnp.float32 else lax.Precision.DEFAULT

    def product(a, b, contracted: int) -> jax.Array:
        dims = (((1,), (contracted,)), ((), ()))
        operands = a.astype(static.dtype), b.astype(static.dtype)
        return lax.dot_general(*operands, dims, precision=precision, preferred_element_type=jnp.float32)

    def fold_head(head: jax.Array | int, kv: jax.Array) -> None:
        k, v = (kv[:, :head_dim], kv[:, head_dim:]) if head_dim % LANES == 0 else (kv, kv)
        scores = product(memory.queries[head], k, 1) * static.scale
        if static.soft_cap:
            scores = static.soft_cap * jnp.tanh(scores / static.soft_cap)
        scores = jnp.where(visible, scores, NEG_INF)
        top = memory.top[head]
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        keep = jnp.exp(top - new_top)
        memory.top[head] = new_top
        memory.total[head] = memory.total[head] * keep + weights.sum(-1, keepdims=True)
        memory.mixed[head] = memory.mixed[head] * keep + product(weights, v, 0)

    reader.for_each_head(fold_head)


def _finish(static: Static, memory: Scratch) -> None:
    """Divides the sums, and lays them out by token and head."""
    tokens, group, head_dim = static.blocks.q_tokens, static.group, static.pool.head_dim
    for kv_head in range(static.pool.kv_heads):
        mixed = memory.mixed[kv_head]
        value = mixed[:, mixed.shape[1] - head_dim :] / memory.total[kv_head]
        if tokens == 1:
            memory.results[0, kv_head * group : (kv_head + 1) * group] = value
            continue
        for i in range(group):
            memory.results[:, kv_head * group + i, :] = value[i * tokens : (i + 1) * tokens]
    memory.out[...] = memory.results[...].astype(memory.out.dtype)
