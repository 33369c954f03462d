"""The two jitted functions of a step, forward and sample, and the one place where their inputs are padded.

Programs are few: `forward` has one per token bucket, `sample` one per row bucket. Everything else is data. What reads
prompts (`take`, `score`, `add_up`) runs in a step only when a row asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from ..models.sharding import ShardedDecoder
from ..models.transformer import Decoder, Params, StepTokens
from ..pallas_kernels.batch import RaggedBatch
from .plan import Row
from .programs import Program, ProgramStore
from .sampler import SampleOutput, ScoreOutput, sample, score
from .sampler_rows import SamplingRows
from .sampler_state import SamplerState


def buckets(limit: int) -> tuple[int, ...]:
    """Powers of two below `limit`, and `limit` itself, whatever it is."""
    sizes = []
    size = 1
    while size < limit:
        sizes.append(size)
        size *= 2
    return (*sizes, limit)


def bucket_of(count: int, sizes: Sequence[int]) -> int:
    """The smallest bucket that holds `count`."""
    return next(size for size in sizes if size >= count)


class StepShapes:
    """Sizes that are fixed once the engine is built, and the packing that depends on them.

    A forward's integers travel in one i32 vector (each array argument costs a few microseconds of dispatch):
    `ids[T] positions[T] slots[T] q_starts[S + 1] kv_lens[S] num_chunks num_rows last[R]`, where T is the token
    bucket, S = min(T, R), and R = max_num_seqs; `last` names the flat tokens whose hidden states are kept.
    An id below 0 stands for the token that the device sampled last for slot `-1 - id`.
    """

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, table_width: int, page_size: int, num_pages: int
    ):
        self.max_num_seqs = max_num_seqs
        self.token_buckets = buckets(max_num_batched_tokens)
        self.row_buckets = buckets(max_num_seqs)
        self.table_width = table_width
        self.page_size = page_size
        self.num_pages = num_pages

    def rows(self, tokens: int) -> int:
        """Rows of the page table in the forward of a token bucket."""
        return min(tokens, self.max_num_seqs)

    def pack(self, chunks: Sequence[Row], decodes: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Packs the rows of a step, padded to the smallest bucket: the vector, and page table i32 `[S, W]`.

        With no rows at all it packs the smallest bucket. Raises IndexError for a page out of range: a bug, which
        on the device would silently read or overwrite another request's KV.
        """
        total = sum(row.count for row in chunks) + len(decodes)
        return self._pack([*chunks, *decodes], len(chunks), bucket_of(total, self.token_buckets))

    def pack_empty(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs of the program of one token bucket that compute nothing, for warm-up."""
        return self._pack([], 0, tokens)

    def _pack(self, rows: Sequence[Row], num_chunks: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        size, page_size = self.rows(tokens), self.page_size
        vector = np.zeros(3 * tokens + 2 * size + 3 + self.max_num_seqs, np.int32)
        ids, positions, slots, rest = np.split(vector, (tokens, 2 * tokens, 3 * tokens))
        q_starts, kv_lens, counts, last = np.split(rest, (size + 1, 2 * size + 1, 2 * size + 3))
        table = np.zeros((size, self.table_width), np.int32)
        at = 0
        sampled = 0
        for index, row in enumerate(rows):
            request, end = row.request, row.start + row.count
            assert request.lease is not None
            pages = np.asarray(request.lease.pages, np.int32)
            used = -(-end // page_size)
            if len(pages) < used or pages.min() < 0 or pages.max() >= self.num_pages:
                raise IndexError(
                    f"{request.id}: page out of range: {pages.min()} or {pages.max()} of {self.num_pages}"
                )
            table[index, :used] = pages[:used]
            here = slice(at, at + row.count)
            known = request.tokens[row.start : end]
            ids[at : at + len(known)] = known
            if len(known) < row.count:
                ids[at + row.count - 1] = -1 - request.slot
            position = np.arange(row.start, end, dtype=np.int32)
            positions[here] = position
            slots[here] = pages[position // page_size] * page_size + position % page_size
            at += row.count
            q_starts[index + 1] = at
            kv_lens[index] = end
            if row.sample:
                last[sampled] = at - 1
                sampled += 1
        # Padding writes to the scratch page behind the last one.
        padding = np.arange(tokens - at, dtype=np.int32)
        slots[at:] = self.num_pages * page_size + padding % page_size
        q_starts[len(rows) + 1 :] = at
        counts[:] = num_chunks, len(rows)
        return vector, table

    def unpack(
        self, vector: jax.Array, tokens: int, table: jax.Array
    ) -> tuple[StepTokens, RaggedBatch, jax.Array]:
        """The reverse of `pack`, traced: step tokens (ids not resolved yet), ragged batch, kept rows `[R]`."""
        size = self.rows(tokens)
        ids, positions, slots, rest = jnp.split(vector, (tokens, 2 * tokens, 3 * tokens))
        q_starts, kv_lens, counts, last = jnp.split(rest, (size + 1, 2 * size + 1, 2 * size + 3))
        batch = RaggedBatch(q_starts, kv_lens, table, num_chunks=counts[0], num_rows=counts[1])
        return StepTokens(ids, positions, slots), batch, last


class StepFunctions:
    """The jitted forward and sample of one model; the pool and the sampler's state are donated."""

    def __init__(
        self,
        decoder: Decoder | ShardedDecoder,
        shapes: StepShapes,
        pool_format: Format | NamedSharding | None = None,
        compiler_options: dict[str, str] | None = None,
        everywhere: NamedSharding | None = None,
        store: ProgramStore | None = None,
    ) -> None:
        """pool_format: how the pool lies, see `pages.pool_format`; compiler_options: see `platform.compiler_options`;
        everywhere: of results, where there are several devices, each of which has all of them; store: keeps compiled
        programs, None as jax does."""
        self._decoder = decoder
        self._shapes = shapes
        options = compiler_options or None
        store = ProgramStore(None, (), ()) if store is None else store

        def program(
            name: str, function: Callable[..., Any], variant: Callable[..., Any], **how: Any
        ) -> Program:
            how = {"out_shardings": everywhere} | how
            return Program(store, name, jax.jit(function, compiler_options=options, **how), variant)

        self.forward = program(
            "forward",
            self._forward,
            lambda _, pool, __, vector, table, tokens: (tokens, pool.shape, vector.shape, table.shape),
            static_argnames="tokens",
            donate_argnames="pool",
            out_shardings=(everywhere, everywhere, pool_format),
        )
        self.sample = program(
            "sample", self._sample, lambda _, __, rows, *___: rows.flags.shape[0], donate_argnames="state"
        )
        self.take = program(
            "take",
            lambda hidden_td, at_p: hidden_td[at_p],
            lambda hidden_td, at_p: (hidden_td.shape[0], at_p.shape[0]),
        )
        self.score = program("score", self._score, lambda _, hidden_pd, *__: hidden_pd.shape[0])
        self.add_up = program(
            "add_up",
            self._add_up,
            lambda hidden_pd, *_, groups: (hidden_pd.shape[0], groups),
            static_argnames="groups",
        )

    def _forward(
        self,
        params: Params,
        pool: jax.Array,
        last_tokens: jax.Array,
        vector: jax.Array,
        table: jax.Array,
        *,
        tokens: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Hidden states of the kept rows `[R, D]` and of all `[T, D]`, and the pool with the step's KV."""
        step, batch, last = self._shapes.unpack(vector, tokens, table)
        fed_back = last_tokens[jnp.clip(-1 - step.ids, 0)]
        step = step._replace(ids=jnp.where(step.ids < 0, fed_back, step.ids))
        hidden_td, pool = self._decoder.forward(params, pool, step, batch)
        return hidden_td[last], hidden_td, pool

    def _sample(
        self, params: Params, hidden_rd: jax.Array, rows: SamplingRows, state: SamplerState, mask: jax.Array
    ) -> tuple[SampleOutput, SamplerState]:
        """Samples for the first `rows` of the kept hidden states."""
        logits = self._decoder.logits(params, hidden_rd[: rows.flags.shape[0]])
        return sample(logits, rows, state, mask)

    def _score(
        self, params: Params, hidden_pd: jax.Array, tokens_p: jax.Array, wants_top_p: jax.Array
    ) -> ScoreOutput:
        """Log-probs of the tokens that follow the hidden states."""
        return score(self._decoder.logits(params, hidden_pd), tokens_p, wants_top_p)

    def _add_up(self, hidden_pd: jax.Array, group_p: jax.Array, *, groups: int) -> jax.Array:
        """Sums f32 `[groups, D]` of the hidden states of each group; others are left out."""
        members = jax.nn.one_hot(group_p, groups, axis=0, dtype=jnp.float32)
        return jnp.matmul(members, hidden_pd.astype(jnp.float32), precision="highest")
