"""What the device remembers of each running request for sampling: last token, token history, logit biases."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .request import Request
from .sampler_rows import MAX_BIAS, bias_entries

HISTORY_CHUNK = 1024
"""Tokens per call of `add_history`; longer histories take several calls of the one compiled program."""


class SamplerState(NamedTuple):
    """Per request slot; every function that updates it donates it, so the owner replaces its handle at once."""

    last_tokens: jax.Array
    """i32[slots]: the token sampled last; the next forward reads it."""
    output_counts: jax.Array
    """i32[slots, V]: how often the request generated each token. Kept for requests with penalties only."""
    prompt_seen: jax.Array
    """bool[slots, V]: which tokens its prompt has. Kept for requests with penalties only."""
    bias_ids: jax.Array
    """i32[slots, B]: tokens with a bias; V = unused."""
    bias_values: jax.Array
    """f32[slots, B]: added to the token's logit; -inf forbids it."""
    bias_until: jax.Array
    """i32[slots, B]: the entry counts while fewer tokens than this are generated."""

    @property
    def num_slots(self) -> int:
        return self.last_tokens.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.output_counts.shape[1]

    @property
    def max_bias(self) -> int:
        return self.bias_ids.shape[1]


def init_state(num_slots: int, vocab_size: int, max_bias: int = MAX_BIAS) -> SamplerState:
    """An empty state on the default device. `vocab_size` is the width of the logits."""
    return SamplerState(
        last_tokens=jnp.zeros(num_slots, jnp.int32),
        output_counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
        prompt_seen=jnp.zeros((num_slots, vocab_size), bool),
        bias_ids=jnp.full((num_slots, max_bias), vocab_size, jnp.int32),
        bias_values=jnp.zeros((num_slots, max_bias), jnp.float32),
        bias_until=jnp.zeros((num_slots, max_bias), jnp.int32),
    )


def state_bytes(num_slots: int, vocab_size: int, max_bias: int = MAX_BIAS) -> int:
    """Device memory of `init_state(...)` in bytes."""
    return num_slots * (4 + 5 * vocab_size + 12 * max_bias)


def prepare_slot(state: SamplerState, request: Request) -> SamplerState:
    """Sets up `request.slot` at an admission; a request without penalties and biases costs nothing.

    All of `request.tokens` count as history, so no token may be in flight. Raises ValueError as
    `bias_entries` does, before the state is touched.
    """
    slot = np.int32(request.slot)
    biases = bias_entries(request, state.vocab_size, state.max_bias)
    if biases is not None:
        state = set_bias(state, slot, *biases)
    if request.penalizes:
        tokens = np.asarray(request.tokens, np.int32)
        state = clear_history(state, slot)
        state = _load(state, slot, tokens[: request.num_prompt], is_output=False)
        state = _load(state, slot, tokens[request.num_prompt :], is_output=True)
    return state


def warm_up_state(state: SamplerState) -> SamplerState:
    """Compiles every update on a slot that does not exist, so that nothing changes."""
    nowhere = np.int32(state.num_slots)
    width = state.max_bias
    state = clear_history(state, nowhere)
    state = set_bias(
        state, nowhere, np.zeros(width, np.int32), np.zeros(width, np.float32), np.zeros(width, np.int32)
    )
    return _load(state, nowhere, np.zeros(1, np.int32), is_output=True)


def _load(state: SamplerState, slot: np.int32, tokens: np.ndarray, is_output: bool) -> SamplerState:
    for start in range(0, len(tokens), HISTORY_CHUNK):
        part = tokens[start : start + HISTORY_CHUNK]
        ids = np.zeros(HISTORY_CHUNK, np.int32)
        ids[: len(part)] = part
        state = add_history(state, slot, ids, np.int32(len(part)), np.bool_(is_output))
    return state


@partial(jax.jit, donate_argnames="state")
def clear_history(state: SamplerState, slot: np.int32) -> SamplerState:
    """Forgets the tokens of the slot's former request."""
    return state._replace(
        output_counts=state.output_counts.at[slot].set(0, mode="drop"),
        prompt_seen=state.prompt_seen.at[slot].set(False, mode="drop"),
    )


@partial(jax.jit, donate_argnames="state")
def set_bias(
    state: SamplerState, slot: np.int32, ids: np.ndarray, values: np.ndarray, until: np.ndarray
) -> SamplerState:
    """Replaces the slot's bias table by `bias_entries(...)`."""
    return state._replace(
        bias_ids=state.bias_ids.at[slot].set(ids, mode="drop"),
        bias_values=state.bias_values.at[slot].set(values, mode="drop"),
        bias_until=state.bias_until.at[slot].set(until, mode="drop"),
    )


@partial(jax.jit, donate_argnames="state")
def add_history(
    state: SamplerState, slot: np.int32, ids: np.ndarray, count: np.int32, is_output: np.bool_
) -> SamplerState:
    """Adds the first `count` of `ids` (i32[HISTORY_CHUNK]) to the slot's generated or prompt tokens."""
    real = jnp.arange(ids.shape[0]) < count
    as_output = jnp.where(real & is_output, slot, state.num_slots)
    as_prompt = jnp.where(real & ~is_output, slot, state.num_slots)
    return state._replace(
        output_counts=state.output_counts.at[as_output, ids].add(1, mode="drop"),
        prompt_seen=state.prompt_seen.at[as_prompt, ids].set(True, mode="drop"),
    )
