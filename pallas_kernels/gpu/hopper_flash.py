"""What the Hopper kernels share: KV pages streamed through shared memory, and an online softmax on the tensor cores.

A thread block is one warpgroup that only copies and some that compute (warp specialisation, as in FlashAttention-3;
Shah et al., 2024). The copying one walks the page table and fills a ring of KV blocks by asynchronous bulk copies (TMA);
`filled` and `freed` barriers, one of each per place in the ring, hand the places over. A block holds K and V side by
side, as pages do, so that one copy brings both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .blocks import ROWS, Blocks

MASKED = -1e30
"""A score that is not to count."""
FLOOR = -1e20
"""Where the running maximum starts: far above MASKED, so that masked scores weigh exactly 0 from the start, whatever
finite values stale KV holds; far below any score."""

Ref = Any
"""A reference into device memory, indexed by `.at`; Pallas exports no type for it."""


class Plan(NamedTuple):
    """What is known of a kernel when it is traced."""

    blocks: Blocks
    head_dim: int
    page_size: int
    layers: int
    scale: float
    soft_cap: float
    interpreted: bool
    """By Mosaic GPU's interpreter, which (in jax 0.10.2) knows no layouts of register arrays, and no matrix product with a
    transposed operand or one in registers: products are then plain ones. All else runs as it is."""

    @property
    def copied_tokens(self) -> int:
        """Per asynchronous copy: a page, or as much of it as a KV block holds."""
        return min(self.page_size, self.blocks.kv_tokens)

    def compiler_params(self) -> plgpu.CompilerParams:
        return plgpu.CompilerParams(
            # tanh is too coarse when approximated: its error would be multiplied by the cap.
            approx_math=not self.soft_cap,
            # Layouts of register arrays are stated here; the other semantics, jax 0.11's default, infers them.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        )

    def tiled(self, *shape: int) -> Any:
        """bf16 shared memory in the tiles that matrix products read."""
        columns = self.blocks.swizzle // 2
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(self.blocks.swizzle))
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    def ring(self, freed_by: int) -> dict[str, Any]:
        """Scratch types: the KV blocks and their barriers. `freed_by`: warpgroups that read each block."""
        blocks = self.blocks
        copies = blocks.kv_tokens // self.copied_tokens
        return {
            "kv_smem": self.tiled(blocks.stages, blocks.kv_tokens, 2 * self.head_dim),
            "filled": plgpu.Barrier(num_arrivals=copies, num_barriers=blocks.stages),
            "freed": plgpu.Barrier(num_arrivals=freed_by, num_barriers=blocks.stages),
        }


class Pages(NamedTuple):
    """Where a row's KV lies."""

    pool_ref: Ref
    """bf16 `[(pages + 1) * layers * page_size, kv_heads, 2 * head_dim]` in device memory."""
    table_ref: Ref
    """i32 `[S, W]`, likewise."""
    layer: jax.Array
    kv_head: jax.Array


def copy_blocks(
    plan: Plan,
    pages: Pages,
    ring: dict[str, Ref],
    row: jax.Array,
    kv_len: jax.Array,
    first: jax.Array,
    stop: jax.Array,
    copied: jax.Array,
) -> jax.Array:
    """Fills the ring with KV blocks `[first, stop)` of a row; `copied` counts blocks since the kernel's start.

    What lies past the row's last page is filled with that page again: it is masked, but must be finite.
    """
    tokens, page_size = plan.blocks.kv_tokens, plan.page_size
    last_page = lax.div(kv_len - 1, page_size)

    def block(b: jax.Array, copied: jax.Array) -> jax.Array:
        place = lax.rem(copied, plan.blocks.stages)

        @pl.when(copied >= plan.blocks.stages)
        def _wait_for_readers() -> None:
            plgpu.barrier_wait(ring["freed"].at[place])

        for part in range(tokens // plan.copied_tokens):
            position = b * tokens + part * plan.copied_tokens
            page = pages.table_ref[row, jnp.minimum(lax.div(position, page_size), last_page)]
            source = (page * plan.layers + pages.layer) * page_size + lax.rem(position, page_size)
            plgpu.copy_gmem_to_smem(
                pages.pool_ref.at[pl.ds(source, plan.copied_tokens), pages.kv_head],
                ring["kv_smem"].at[place, pl.ds(part * plan.copied_tokens, plan.copied_tokens)],
                ring["filled"].at[place],
            )
        return copied + 1

    return lax.fori_loop(first, stop, block, copied)


def wait_until_read(plan: Plan, ring: dict[str, Ref], copied: jax.Array) -> None:
    """The copying warpgroup's end: every block has been read, no barrier is left with an arrival that nobody saw."""

    def place(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(ring["freed"].at[lax.rem(i, plan.blocks.stages)])

    lax.fori_loop(jnp.maximum(copied - plan.blocks.stages, 0), copied, place, None)


class Softmax(NamedTuple):
    """An online softmax in progress over a warpgroup's 64 rows (Milakov and Gimelshein, 2018), in powers of two."""

    top: jax.Array
    """f32 `[64]`: largest score so far."""
    total: jax.Array
    """f32 `[64]`: sum of the weights."""
    mixed: jax.Array
    """f32 `[64, head_dim]`: weighted sum of values."""

    @classmethod
    def empty(cls, plan: Plan) -> Softmax:
        return cls(
            row_array(plan, jnp.full((ROWS,), FLOOR, jnp.float32)),
            row_array(plan, jnp.zeros((ROWS,), jnp.float32)),
            matrix(plan, jnp.zeros((ROWS, plan.head_dim), jnp.float32)),
        )

    def log_weight(self) -> jax.Array:
        """f32 `[64]`: the exponent of two that a result weighs when it is combined with others; FLOOR or less for none."""
        return self.top + jnp.log(jnp.where(self.total > 0, self.total, 1.0)) * math.log2(math.e)

    def result(self) -> jax.Array:
        """f32 `[64, head_dim]`. Rows that saw nothing are 0."""
        share = 1.0 / jnp.where(self.total > 0, self.total, 1.0)
        return self.mixed * _by_row(share, self.mixed.shape)


def fold_block(
    plan: Plan,
    q_smem: Ref,
    ring: dict[str, Ref],
    place: jax.Array,
    softmax: Softmax,
    mask: Callable[[jax.Array], jax.Array],
    masks: jax.Array,
) -> Softmax:
    """Takes in the KV block at a place of the ring, once it is there, and frees the place.

    `mask` gives scores `[64, kv_tokens]` with MASKED where a row may not look; it is skipped unless `masks`.
    """
    head_dim, kv_smem = plan.head_dim, ring["kv_smem"]
    plgpu.barrier_wait(ring["filled"].at[place])
    scores = _scores(plan, q_smem, kv_smem.at[place, :, pl.ds(0, head_dim)])
    scores = lax.cond(masks, mask, lambda scores: scores, scores)
    top = jnp.maximum(softmax.top, scores.max(axis=1))
    weights = jnp.exp2(scores - _by_row(top, scores.shape))
    keep = jnp.exp2(softmax.top - top)
    total = softmax.total * keep + weights.sum(axis=1)
    mixed = _mix(
        plan,
        softmax.mixed * _by_row(keep, softmax.mixed.shape),
        weights.astype(jnp.bfloat16),
        kv_smem.at[place, :, pl.ds(head_dim, head_dim)],
    )
    plgpu.barrier_arrive(ring["freed"].at[place])
    return Softmax(top, total, mixed)


def matrix(plan: Plan, array: jax.Array) -> jax.Array:
    """A constant `[64, n]` in the registers that matrix products leave theirs in."""
    return array if plan.interpreted else plgpu.layout_cast(array, plgpu.Layout.WGMMA)


def row_array(plan: Plan, array: jax.Array) -> jax.Array:
    """A constant `[64]`, one value per row of such a matrix."""
    return array if plan.interpreted else plgpu.layout_cast(array, plgpu.Layout.WGMMA.reduce(1))


def row_index(plan: Plan) -> jax.Array:
    """i32 `[64]`."""
    if plan.interpreted:
        return lax.iota(jnp.int32, ROWS)
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))


def visible_only(
    plan: Plan, block: jax.Array, first: jax.Array, stop: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """The mask of a KV block for rows that see positions `[first, stop)`; both are i32, `[64]` or a scalar for all."""
    shape = (ROWS, plan.blocks.kv_tokens)

    def mask(scores: jax.Array) -> jax.Array:
        if plan.interpreted:
            position = lax.broadcasted_iota(jnp.int32, shape, 1)
        else:
            position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        position += block * plan.blocks.kv_tokens
        visible = (position >= _by_row(first, shape)) & (position < _by_row(stop, shape))
        return jnp.where(visible, scores, MASKED)

    return mask


def _scores(plan: Plan, q_smem: Ref, k_smem: Ref) -> jax.Array:
    """f32 `[64, kv_tokens]`, as exponents of two."""
    if plan.interpreted:
        scores = jnp.dot(q_smem[...], k_smem[...].T, preferred_element_type=jnp.float32)
    else:

        def multiply(sum_ref: Ref) -> jax.Array:
            plgpu.wgmma(sum_ref, q_smem, k_smem.transpose((1, 0)))
            return sum_ref[...]

        shape = (ROWS, plan.blocks.kv_tokens)
        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    log2e = math.log2(math.e)
    if plan.soft_cap:
        return jnp.tanh(scores * (plan.scale / plan.soft_cap)) * (plan.soft_cap * log2e)
    return scores * (plan.scale * log2e)


def _mix(plan: Plan, mixed: jax.Array, weights: jax.Array, v_smem: Ref) -> jax.Array:
    """`mixed + weights @ v`, in the registers of `mixed`: f32 `[64, head_dim]` of bf16 weights `[64, kv_tokens]`."""
    if plan.interpreted:
        return mixed + jnp.dot(weights, v_smem[...], preferred_element_type=jnp.float32)

    def multiply(sum_ref: Ref) -> None:
        plgpu.wgmma(sum_ref, weights, v_smem)

    # Its end waits for the product.
    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(mixed))  # pyright: ignore[reportReturnType]


def _by_row(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(values, shape, () if values.ndim == 0 else (0,))
