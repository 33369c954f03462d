"""What the device remembers of each running request for sampling: last token, token history, logit biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

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


Update = tuple[str, tuple[Any, ...]]
"""A change of one slot: a name of `UPDATES`, and its arguments behind the state, which are host values."""


def slot_updates(request: Request, vocab_size: int, max_bias: int = MAX_BIAS) -> list[Update]:
    """Sets up `request.slot` at an admission, in order; for a request without penalties and biases nothing.

    All of `request.tokens` count as history, so no token may be in flight. Raises ValueError as `bias_entries` does.
    """
    slot = np.int32(request.slot)
    biases = bias_entries(request, vocab_size, max_bias)
    updates: list[Update] = []
    if biases is not None:
        updates.append(("set_bias", (slot, *biases)))
    if request.penalizes:
        tokens = np.asarray(request.tokens, np.int32)
        updates.append(("clear_history", (slot,)))
        updates += _history(slot, tokens[: request.num_prompt], is_output=False)
        updates += _history(slot, tokens[request.num_prompt :], is_output=True)
    return updates


def warm_up_updates(num_slots: int, max_bias: int = MAX_BIAS) -> list[Update]:
    """Every update, on a slot that does not exist, so that nothing changes."""
    nowhere = np.int32(num_slots)
    biases = np.zeros(max_bias, np.int32), np.zeros(max_bias, np.float32), np.zeros(max_bias, np.int32)
    return [
        ("clear_history", (nowhere,)),
        ("set_bias", (nowhere, *biases)),
        *_history(nowhere, np.zeros(1, np.int32), is_output=True),
    ]


def _history(slot: np.int32, tokens: np.ndarray, is_output: bool) -> Iterator[Update]:
    for start in range(0, len(tokens), HISTORY_CHUNK):
        part = tokens[start : start + HISTORY_CHUNK]
        ids = np.zeros(HISTORY_CHUNK, np.int32)
        ids[: len(part)] = part
        yield "add_history", (slot, ids, np.int32(len(part)), np.bool_(is_output))


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


UPDATES: dict[str, Callable[..., SamplerState]] = {
    "clear_history": clear_history,
    "set_bias": set_bias,
    "add_history": add_history,
}
