"""Ragged paged attention: the one entry. Which path runs is chosen here, once, when a step is built."""

from __future__ import annotations

from collections.abc import Callable

import jax

from . import xla

Attend = Callable[..., jax.Array]
"""`attend(q_thd, pool, layer, batch, *, window, soft_cap, scale) -> out_thd`.

q_thd: `[T, heads, head_dim]` (f32 or bf16); pool: see `pages`; layer: index into the pool's layers;
batch: `RaggedBatch`; window: sliding window in tokens, 0 = full; soft_cap: tanh cap on scores, 0 = none;
scale: of the scores, None = head_dim ** -0.5. Returns `[T, heads, head_dim]` in q's dtype; rows of padding
tokens are undefined but finite. The KV of the batch's own tokens must be in the pool before the call.
"""

BACKENDS: dict[str, Attend] = {"xla": xla.attend}


def select(backend: str = "auto") -> Attend:
    """The attention path called `backend`; `auto` takes the best one for the platform.

    Raises ValueError for an unknown name.
    """
    name = "xla" if backend == "auto" else backend
    if name not in BACKENDS:
        raise ValueError(
            f"unknown attention backend {backend!r}: choose auto or one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]
