"""The description of a mixed batch that every attention path reads."""

from __future__ import annotations

from typing import NamedTuple

import jax


class RaggedBatch(NamedTuple):
    """Rows of a step over one flat token axis: prefill chunks first, then decodes of one token each.

    Row r owns tokens `[q_starts[r], q_starts[r + 1])`; they are the last ones of its `kv_lens[r]` positions.
    Entries past `num_rows` are padding and are not read. The KV of the batch's own tokens is already in the pool.
    """

    q_starts: jax.Array
    """i32 `[S + 1]`."""
    kv_lens: jax.Array
    """i32 `[S]`: positions that the row's last token may see, itself included."""
    page_table: jax.Array
    """i32 `[S, W]`: page of positions `[i * page_size, (i + 1) * page_size)`; 0 where unused."""
    num_chunks: jax.Array
    """i32 scalar: rows `[0, num_chunks)` may have several tokens."""
    num_rows: jax.Array
    """i32 scalar."""
