"""Chooses the next token of every row on the device: one pure program per bucket of rows, options are data.

The order, for each row: repetition, frequency and presence penalties; logit biases and `min_tokens`; the mask of a
constraint, which has the last word; then either the likeliest token (lowest id on ties), or temperature, top_k, top_p, min_p and a draw. A draw adds Gumbel noise
that depends on the request's seed and the token's position only, and takes the maximum: neither the row, nor
its neighbours, nor padding can change it.

Costly work stands under `lax.cond` on "does any row ask for it", and never changes the rows that do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .sampler_rows import BIAS, LOGPROB, MASK, PENALTIES, TOP, SamplingRows
from .sampler_state import SamplerState

NUM_TOP = 20
"""How many of the likeliest tokens are reported at most."""

GREEDY_BELOW = 1e-5
"""A temperature up to this takes the likeliest token."""

LOGPROB_FLOOR = -9999.0
"""Log-probs are never lower, hence always finite."""

_ARGMAX_BLOCK = 512
_GROUP_LOGITS = 1 << 20
_BITS_OF_ONE = 0x3F800000


class SampleOutput(NamedTuple):
    """What one step chose, for S rows. Log-probs are natural, of the model's own distribution: before penalties,
    biases, temperature and filters."""

    tokens: jax.Array
    """i32[S]; always a valid id."""
    logprobs: jax.Array
    """f32[S]: of the chosen token; 0 for rows that did not ask."""
    top_ids: jax.Array
    """i32[S, min(NUM_TOP, V)], likeliest first, lower id first on ties; 0 for rows that did not ask."""
    top_logprobs: jax.Array
    """f32[S, min(NUM_TOP, V)]; 0 for rows that did not ask."""


class ScoreOutput(NamedTuple):
    """Log-probs of given tokens, for P rows: natural, of the model's own distribution."""

    logprobs: jax.Array
    """f32[P]."""
    ranks: jax.Array
    """i32[P]: 1 for the likeliest token; tokens that tie share the better rank."""
    top_ids: jax.Array
    """i32[P, min(NUM_TOP, V)], likeliest first, lower id first on ties; 0 if they were not wanted."""
    top_logprobs: jax.Array
    """f32[P, min(NUM_TOP, V)]; 0 if they were not wanted."""


@partial(jax.jit, donate_argnames="state")
def sample(
    logits: jax.Array, rows: SamplingRows, state: SamplerState, mask: jax.Array | None = None
) -> tuple[SampleOutput, SamplerState]:
    """Samples one token per row from `logits` f32[S, V] and records it in the (donated) state.

    `mask` i32[S, ceil(V / 32)] has a bit for each token that may come, and counts for rows with MASK.
    A NaN logit counts as -inf, +inf as 1e30. A row with no possible token gets the id 0.
    """
    if mask is None:
        mask = jnp.zeros((logits.shape[0], -(-logits.shape[1] // 32)), jnp.int32)
    tokens = lax.cond(
        jnp.any(_drawn(rows) | rows.asks(PENALTIES | BIAS | MASK)),
        lambda: _in_groups(partial(_choose, state=state), logits, rows, mask),
        lambda: _argmax(logits),
    )
    logprobs, top_ids, top_logprobs = lax.cond(
        jnp.any(rows.asks(LOGPROB | TOP)),
        lambda: _in_groups(_report, logits, rows, tokens),
        lambda: _no_report(logits),
    )
    return SampleOutput(tokens, logprobs, top_ids, top_logprobs), _record(tokens, rows, state)


def score(logits: jax.Array, tokens: jax.Array, wants_top: jax.Array) -> ScoreOutput:
    """What `logits` f32[P, V] say of `tokens` i32[P]; `wants_top` bool[P]: and which are the likeliest."""
    return _in_groups(_score, logits, tokens, wants_top)


def _in_groups(function: Callable[..., Any], *by_row: Any) -> Any:
    """Applies a function of row-wise arrays, the first f32[S, V]; on a CPU a few rows at a time.

    That bounds the scratch memory, and is 1.2 to 2.5 times faster than all 64 rows of 49,152 logits at once.
    """
    size, vocab_size = by_row[0].shape
    fitting = max(1, _GROUP_LOGITS // vocab_size)
    group = math.gcd(size, 1 << (fitting.bit_length() - 1)) if jax.default_backend() == "cpu" else size
    if group == size:
        return function(*by_row)
    groups = jax.tree.map(lambda x: x.reshape(size // group, group, *x.shape[1:]), by_row)
    results = lax.map(lambda arguments: function(*arguments), groups)
    return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), results)


def _drawn(rows: SamplingRows) -> jax.Array:
    return rows.temperature > GREEDY_BELOW


def _clean(logits: jax.Array) -> jax.Array:
    # Done where it fuses with the use, lest a copy of all logits be made.
    return jnp.nan_to_num(logits, nan=-jnp.inf, posinf=1e30, neginf=-jnp.inf)


def _record(tokens: jax.Array, rows: SamplingRows, state: SamplerState) -> SamplerState:
    counted_slot = jnp.where(rows.asks(PENALTIES), rows.slot, state.num_slots)
    return state._replace(
        last_tokens=state.last_tokens.at[rows.slot].set(tokens, mode="drop"),
        output_counts=state.output_counts.at[counted_slot, tokens].add(1, mode="drop"),
    )


# --- changes to the logits


def _penalize(logits: jax.Array, rows: SamplingRows, state: SamplerState) -> jax.Array:
    on = rows.asks(PENALTIES)[:, None]

    def apply() -> jax.Array:
        counts = jnp.where(on, state.output_counts.at[rows.slot].get(mode="clip"), 0)
        generated = counts > 0
        seen = generated | (on & state.prompt_seen.at[rows.slot].get(mode="clip"))
        factor = jnp.where(seen, rows.repetition_penalty[:, None], 1.0)
        repeated = jnp.where(logits > 0, logits / factor, logits * factor)
        frequency = rows.frequency_penalty[:, None] * counts
        return repeated - frequency - jnp.where(generated, rows.presence_penalty[:, None], 0.0)

    return lax.cond(jnp.any(on), apply, lambda: logits)


def _bias(logits: jax.Array, rows: SamplingRows, state: SamplerState) -> jax.Array:
    on = rows.asks(BIAS)[:, None]

    def apply() -> jax.Array:
        until = state.bias_until.at[rows.slot].get(mode="clip")
        ids = state.bias_ids.at[rows.slot].get(mode="clip")
        active_ids = jnp.where(on & (rows.num_output[:, None] < until), ids, logits.shape[1])
        values = state.bias_values.at[rows.slot].get(mode="clip")
        row = jnp.arange(logits.shape[0])[:, None]
        return logits.at[row, active_ids].add(values, mode="drop")

    return lax.cond(jnp.any(on), apply, lambda: logits)


def _allow(logits: jax.Array, rows: SamplingRows, mask: jax.Array) -> jax.Array:
    """Sets to -inf what the mask i32[S, ceil(V / 32)] leaves out, for rows that have one."""
    on = rows.asks(MASK)[:, None]

    def apply() -> jax.Array:
        bits = mask[:, :, None] >> lax.broadcasted_iota(jnp.int32, (1, 1, 32), 2)
        allowed = (bits & 1).reshape(mask.shape[0], -1)[:, : logits.shape[1]] != 0
        return jnp.where(allowed | ~on, logits, -jnp.inf)

    return lax.cond(jnp.any(on), apply, lambda: logits)


# --- the choice


def _choose(logits: jax.Array, rows: SamplingRows, mask: jax.Array, *, state: SamplerState) -> jax.Array:
    logits = _bias(_penalize(_clean(logits), rows, state), rows, state)
    logits = _allow(logits, rows, mask)
    return lax.cond(jnp.any(_drawn(rows)), lambda: _draw(logits, rows), lambda: _argmax(logits))


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    drawn = _drawn(rows)[:, None]
    best = jnp.max(logits, axis=-1, keepdims=True)
    # The maximum goes first: a tiny temperature then only pushes the others towards -inf.
    scaled = logits - jnp.where(jnp.isfinite(best), best, 0.0)
    scaled = scaled / jnp.where(drawn, rows.temperature[:, None], 1.0)
    noise = jnp.where(drawn, _gumbel(rows, logits.shape[1]), 0.0)
    # Computed once: fused into both passes of the maximum, it would cost twice and might round differently.
    return _argmax(lax.optimization_barrier(_filter(scaled, rows) + noise))


def _argmax(scores: jax.Array) -> jax.Array:
    """i32[S]: the lowest id among the highest scores f32[S, V]; NaN counts as -inf.

    XLA's argmax is not vectorised on a CPU but its maximum is: so find the best block first, then look inside.
    """
    size, vocab_size = scores.shape
    width = math.gcd(vocab_size, _ARGMAX_BLOCK)
    if width < 64:
        return _first_best(scores)
    blocks = scores.reshape(size, vocab_size // width, width)
    block = _first_best(jnp.max(_clean(blocks), axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * width + _first_best(inside)


def _first_best(scores: jax.Array) -> jax.Array:
    scores = _clean(scores)
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    best = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(scores == best, ids, scores.shape[1] - 1), axis=-1)


def _filter(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """Sets to -inf what top_k, top_p and min_p exclude. `scaled` f32[S, V] is 0 at each row's best token.

    Each filter keeps the tokens whose weight (probability relative to the best token, in f32) reaches a floor,
    so the highest floor decides. Tokens that tie at a floor stay together; the best token always stays.
    """
    vocab_size, drawn = scaled.shape[1], _drawn(rows)
    by_k = drawn & (rows.top_k > 0) & (rows.top_k < vocab_size)
    by_p = drawn & (rows.top_p < 1.0)
    by_min = drawn & (rows.min_p > 0.0)

    def apply() -> jax.Array:
        weights = lax.optimization_barrier(jnp.exp(scaled))

        def top_k(floor: jax.Array) -> jax.Array:
            def count(floor: jax.Array) -> jax.Array:
                return jnp.sum(jnp.where(weights >= floor[:, None], 1.0, 0.0), axis=-1)

            return _raise_floor(floor, by_k, count, rows.top_k.astype(jnp.float32), jnp.ones_like)

        def top_p(floor: jax.Array) -> jax.Array:
            def mass(floor: jax.Array) -> jax.Array:
                return jnp.sum(jnp.where(weights >= floor[:, None], weights, 0.0), axis=-1)

            return _raise_floor(floor, by_p, mass, rows.top_p * mass(floor), lambda floor: floor)

        floor = jnp.zeros_like(rows.min_p)
        floor = lax.cond(jnp.any(by_k), top_k, lambda floor: floor, floor)
        floor = lax.cond(jnp.any(by_p), top_p, lambda floor: floor, floor)
        floor = jnp.maximum(floor, jnp.where(by_min, rows.min_p, 0.0))
        return jnp.where((weights >= floor[:, None]) | (scaled == 0.0), scaled, -jnp.inf)

    return lax.cond(jnp.any(by_k | by_p | by_min), apply, lambda: scaled)


def _raise_floor(
    floor: jax.Array,
    active: jax.Array,
    measure: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    smallest: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The highest floor f32[S] (up to ties) whose kept weights still measure at least `target`.

    Bisects on the bits of the floor, which order non-negative floats, instead of sorting the vocabulary. A row is
    done early when what it keeps would miss the target without its smallest member, which measures at
    least `smallest(floor)`. Rows that are not active keep their floor.
    """

    def unfinished(low: jax.Array, high: jax.Array, measured: jax.Array) -> jax.Array:
        spare = measured - smallest(_float(low)) >= target
        return active & (high - low > 1) & spare

    def halve(bounds: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        low, high, measured = bounds
        middle = low + (high - low) // 2
        here = measure(_float(middle))
        going = unfinished(low, high, measured)
        enough = here >= target
        return (
            jnp.where(going & enough, middle, low),
            jnp.where(going & ~enough, middle, high),
            jnp.where(going & enough, here, measured),
        )

    low = lax.bitcast_convert_type(floor, jnp.int32)
    above_best = jnp.full_like(low, _BITS_OF_ONE + 1)
    start = (low, above_best, jnp.full_like(target, jnp.inf))
    return _float(lax.while_loop(lambda bounds: jnp.any(unfinished(*bounds)), halve, start)[0])


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


# --- noise


def _gumbel(rows: SamplingRows, vocab_size: int) -> jax.Array:
    """f32[S, V] of standard Gumbel noise, a function of (seed, position, token id) alone.

    Finer than 2**-32 in the upper tail, so that even very unlikely tokens have their share.
    """
    seed = lax.bitcast_convert_type(rows.seed, jnp.uint32)
    position = rows.position.astype(jnp.uint32)
    step_key = threefry2x32((seed[:, 0], seed[:, 1]), (position, jnp.zeros_like(position)))
    ids = lax.broadcasted_iota(jnp.uint32, (1, vocab_size), 1)
    key = (step_key[0][:, None], step_key[1][:, None])
    bits, _ = threefry2x32(key, (ids, jnp.zeros_like(ids)))
    uniform = jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def threefry2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The Threefry-2x32 block cipher with 20 rounds on uint32 words, broadcasting.

    Written out so that XLA fuses it with its use; and seeds outlive changes of `jax.random`.
    """
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << jnp.uint32(distance)) | (y >> jnp.uint32(32 - distance))) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


# --- log-probs


def _report(
    logits: jax.Array, rows: SamplingRows, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    logprobs, _, top_ids, top_logprobs = _score(logits, tokens, rows.asks(TOP))
    return jnp.where(rows.asks(LOGPROB), logprobs, 0.0), top_ids, top_logprobs


def _score(logits: jax.Array, tokens: jax.Array, wants_top: jax.Array) -> ScoreOutput:
    logits, wanted = _clean(logits), wants_top[:, None]

    def floored(logprobs: jax.Array) -> jax.Array:
        return jnp.where(logprobs > LOGPROB_FLOOR, logprobs, LOGPROB_FLOOR)

    def top() -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logits, min(NUM_TOP, logits.shape[1]))
        return jnp.where(wanted, ids, 0), jnp.where(wanted, floored(values - total), 0.0)

    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    ranks = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top_ids, top_logprobs = lax.cond(jnp.any(wanted), top, lambda: _no_report(logits)[1:])
    return ScoreOutput(floored((chosen - total)[:, 0]), ranks, top_ids, top_logprobs)


def _no_report(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    size, width = logits.shape[0], min(NUM_TOP, logits.shape[1])
    return jnp.zeros(size), jnp.zeros((size, width), jnp.int32), jnp.zeros((size, width))
