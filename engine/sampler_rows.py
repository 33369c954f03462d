"""What the sampler needs to know about each row of a step, packed into three small host arrays. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .request import Request

if TYPE_CHECKING:
    import jax


MAX_BIAS = 512
"""Default room for a request's logit biases and, with `min_tokens`, its end tokens."""

PENALTIES, BIAS, LOGPROB, TOP, MASK = 1, 2, 4, 8, 16
"""Bits of `SamplingRows.flags`: which optional work a row asks for."""

FOREVER = np.iinfo(np.int32).max
"""`until` of a bias that never ends."""

_SEED_MASK = (1 << 64) - 1


class SamplingRows(NamedTuple):
    """The rows of one step that sample, padded to a bucket of S rows.

    Options are data, so that one compiled program per S serves them all. A padded row has
    `slot == num_slots`, which is out of range on the device: its writes are dropped.
    """

    floats: jax.Array
    """f32[S, 6]: temperature, top_p, min_p, repetition, frequency and presence penalty."""
    ints: jax.Array
    """i32[S, 6]: slot, top_k (<= 0 keeps all), low and high word of the seed (bit patterns of uint32),
    position of the token to sample in its sequence, number of tokens generated before it."""
    flags: jax.Array
    """i32[S]: bits PENALTIES, BIAS, LOGPROB (of the chosen token), TOP (the likeliest tokens),
    MASK (only some tokens may come)."""

    @property
    def temperature(self) -> jax.Array:
        return self.floats[:, 0]

    @property
    def top_p(self) -> jax.Array:
        return self.floats[:, 1]

    @property
    def min_p(self) -> jax.Array:
        return self.floats[:, 2]

    @property
    def repetition_penalty(self) -> jax.Array:
        return self.floats[:, 3]

    @property
    def frequency_penalty(self) -> jax.Array:
        return self.floats[:, 4]

    @property
    def presence_penalty(self) -> jax.Array:
        return self.floats[:, 5]

    @property
    def slot(self) -> jax.Array:
        return self.ints[:, 0]

    @property
    def top_k(self) -> jax.Array:
        return self.ints[:, 1]

    @property
    def seed(self) -> jax.Array:
        return self.ints[:, 2:4]

    @property
    def position(self) -> jax.Array:
        return self.ints[:, 4]

    @property
    def num_output(self) -> jax.Array:
        return self.ints[:, 5]

    def asks(self, flag: int) -> jax.Array:
        """bool[S]: the rows that have the bit set."""
        return (self.flags & flag) != 0


def pack_rows(samples: Sequence[tuple[Request, int]], bucket: int, num_slots: int) -> SamplingRows:
    """Packs `(request, position of the token to sample)` into NumPy arrays of `bucket` rows.

    The same function pads for warm-up (no samples) and for serving. Requests must hold a slot.
    Raises ValueError if there are more samples than rows.
    """
    if len(samples) > bucket:
        raise ValueError(f"{len(samples)} rows to sample do not fit a bucket of {bucket}")
    floats = np.tile(np.array([0, 1, 0, 1, 0, 0], np.float32), (bucket, 1))
    ints = np.zeros((bucket, 6), np.uint32)
    ints[:, 0] = num_slots
    flags = np.zeros(bucket, np.int32)
    for row, (request, position) in enumerate(samples):
        params = request.params
        seed = request.seed & _SEED_MASK
        num_output = position - request.num_prompt
        floats[row] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        top_k = max(params.top_k, 0)
        ints[row] = (request.slot, top_k, seed & 0xFFFFFFFF, seed >> 32, position, num_output)
        flags[row] = _flags(request, num_output)
    return SamplingRows(floats, ints.view(np.int32), flags)  # pyright: ignore[reportArgumentType]


def _flags(request: Request, num_output: int) -> int:
    params = request.params
    flags = 0
    if request.penalizes:
        flags |= PENALTIES
    if params.logit_bias or (params.min_tokens > num_output and request.stop_ids):
        flags |= BIAS
    if params.logprobs is not None:
        flags |= LOGPROB | (TOP if params.logprobs > 0 else 0)
    return flags


def bias_entries(
    request: Request, vocab_size: int, max_bias: int = MAX_BIAS
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """A slot's bias table, or None if the request needs none.

    Returns ids i32[max_bias], values f32[max_bias] (added to the logits) and until i32[max_bias] (an entry
    counts while fewer tokens than this are generated). `min_tokens` forbids every end token until then.
    Unused entries have the id `vocab_size`, which the device drops.
    Raises ValueError for ids outside the vocabulary and for more entries than `max_bias`.
    """
    params = request.params
    entries = [(token, value, FOREVER) for token, value in params.logit_bias.items()]
    if params.min_tokens > 0:
        entries += [(token, -np.inf, params.min_tokens) for token in sorted(request.stop_ids)]
    if not entries:
        return None
    if len(entries) > max_bias:
        raise ValueError(f"{len(entries)} logit biases and end tokens exceed the limit of {max_bias}")
    outside = [token for token, _, _ in entries if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token ids {outside} lie outside the vocabulary of {vocab_size}")
    ids = np.full(max_bias, vocab_size, np.int32)
    values = np.zeros(max_bias, np.float32)
    until = np.zeros(max_bias, np.int32)
    count = len(entries)
    ids[:count], values[:count], until[:count] = zip(*entries, strict=True)
    return ids, values, until
