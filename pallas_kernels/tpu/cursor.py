"""The order in which the attention kernel walks over rows, their query tiles and the blocks of pages a tile sees."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Rows(NamedTuple):
    """What the walk is computed from: scalars and references to scalar memory, and sizes that are static."""

    q_starts: jax.Ref | jax.Array
    """i32 `[S + 1]`."""
    kv_lens: jax.Ref | jax.Array
    """i32 `[S]`."""
    end: jax.Array
    """The row after the last one."""
    window: jax.Array
    """Sliding window in tokens, 0 = full."""
    q_tokens: int
    """Query tokens per tile."""
    page_size: int
    block_pages: int
    """Pages per block."""


class Cursor(NamedTuple):
    """One step of the walk: a query tile of a row, and the block of pages that is folded into it. i32 scalars."""

    row: jax.Array
    tile: jax.Array
    """Index of the tile in its row."""
    block: jax.Array
    """Index of the block among those of the tile."""
    unit: jax.Array
    """Tiles before this one, of all rows."""
    token: jax.Array
    """First token of the tile on the flat axis."""
    tokens: jax.Array
    """Tokens of the tile; 0 for a row without any."""
    position: jax.Array
    """Of the tile's first token in its sequence."""
    first_page: jax.Array
    """Index in the row's table of the first page that any of the tile's tokens sees."""
    end_page: jax.Array
    """Index after the last one's."""

    @classmethod
    def at(cls, rows: Rows, row: jax.Array, tile: jax.Array | int, unit: jax.Array | int) -> Cursor:
        """The first block of a tile. Past the last row it names nothing, and only its row is to be read."""
        known = jnp.minimum(row, rows.kv_lens.shape[0] - 1)
        start, end, kv_len = rows.q_starts[known], rows.q_starts[known + 1], rows.kv_lens[known]
        token = start + tile * rows.q_tokens
        tokens = jnp.minimum(end - token, rows.q_tokens)
        position = kv_len - (end - token)
        first_seen = jnp.where(rows.window > 0, jnp.maximum(position + 1 - rows.window, 0), 0)
        end_page = lax.div(position + tokens + rows.page_size - 1, rows.page_size)
        first_page = lax.div(first_seen, rows.page_size)
        values = row, tile, 0, unit, token, tokens, position, first_page, end_page
        return cls._make(jnp.asarray(value, jnp.int32) for value in values)

    def next(self, rows: Rows) -> Cursor:
        """The tile's next block, or the first one of the next tile or row."""

        def next_tile() -> Cursor:
            ends = self.token + rows.q_tokens >= rows.q_starts[self.row + 1]
            row = jnp.where(ends, self.row + 1, self.row)
            return Cursor.at(rows, row, jnp.where(ends, 0, self.tile + 1), self.unit + 1)

        return lax.cond(self.is_last(rows), next_tile, lambda: self._replace(block=self.block + 1))

    def is_first(self) -> jax.Array:
        return self.block == 0

    def is_last(self, rows: Rows) -> jax.Array:
        """Every tile has one block at least, so that a row without tokens needs no case of its own."""
        return self.first_page + (self.block + 1) * rows.block_pages >= self.end_page

    def page(self, rows: Rows) -> jax.Array:
        """Index in the row's table of the block's first page."""
        return self.first_page + self.block * rows.block_pages

    def pages(self, rows: Rows) -> jax.Array:
        """Pages of the block that hold anything to be seen."""
        return jnp.clip(self.end_page - self.page(rows), 0, rows.block_pages)
