"""One step of the device sampler for a few requests, and random ones."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from helpers.sampling_reference import make_request
from tierax.engine.request import Request, SamplingParams
from tierax.engine.sampler import SampleOutput, sample
from tierax.engine.sampler_rows import pack_rows
from tierax.engine.sampler_state import (
    UPDATES,
    SamplerState,
    Update,
    init_state,
    slot_updates,
)

SLOTS, VOCAB = 10, 320


def update(state: SamplerState, updates: Sequence[Update]) -> SamplerState:
    for name, arguments in updates:
        state = UPDATES[name](state, *arguments)
    return state


def prepare_slot(state: SamplerState, request: Request) -> SamplerState:
    return update(state, slot_updates(request, state.vocab_size, state.max_bias))


def run(
    logits: np.ndarray, requests: Sequence[Request], bucket: int, state: SamplerState | None = None
) -> tuple[SampleOutput, SamplerState]:
    """Samples the next token of each request; rows beyond them are padded with hostile logits."""
    vocab_size = logits.shape[1]
    current = init_state(SLOTS, vocab_size) if state is None else state
    for request in requests:
        current = prepare_slot(current, request)
    padded = np.full((bucket, vocab_size), np.nan, np.float32)
    padded[: len(requests)] = logits
    rows = pack_rows([(request, len(request.tokens)) for request in requests], bucket, SLOTS)
    output, current = sample(jnp.array(padded), rows, current)
    return SampleOutput(*map(np.array, output)), current  # pyright: ignore[reportArgumentType]


def draw(logits: np.ndarray, params: SamplingParams, seed: int = 3, start: int = 3) -> np.ndarray:
    """Tokens i64[500] drawn from the same logits (of up to 64 tokens) at 500 positions."""
    padded = np.full(64, -np.inf, np.float32)
    padded[: len(logits)] = logits
    rows = pack_rows([(make_request(params, seed=seed), start + row) for row in range(500)], 500, SLOTS)
    output, _ = sample(jnp.tile(padded, (500, 1)), rows, init_state(SLOTS, 64))
    return np.array(output.tokens, np.int64)


def tokens_of(logits: np.ndarray, requests: Sequence[Request], bucket: int) -> list[int]:
    return run(logits, requests, bucket)[0].tokens[: len(requests)].tolist()


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int = VOCAB) -> np.ndarray:
    return (rng.normal(size=(rows, vocab_size)) * 3).astype(np.float32)


def random_request(rng: np.random.Generator, slot: int) -> Request:
    def maybe(value: float, default: float) -> float:
        return value if rng.random() < 0.5 else default

    params = SamplingParams(
        temperature=maybe(float(rng.uniform(0.3, 2.0)), 0.0 if rng.random() < 0.5 else 1.0),
        top_k=int(maybe(int(rng.integers(1, VOCAB + 50)), 0)),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.3)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.7, 1.5)), 1.0),
        frequency_penalty=maybe(float(rng.uniform(-1.0, 1.0)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-1.0, 1.0)), 0.0),
        min_tokens=int(maybe(int(rng.integers(1, 30)), 0)),
    )
    if rng.random() < 0.5:
        ids = rng.choice(VOCAB, size=int(rng.integers(1, 9)), replace=False)
        params.logit_bias = {int(token): float(rng.uniform(-8, 8)) for token in ids}
    return make_request(
        params,
        prompt=rng.integers(0, VOCAB, size=int(rng.integers(1, 60))).tolist(),
        output=rng.integers(0, 40, size=int(rng.integers(0, 60))).tolist(),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        slot=slot,
        stop_ids=rng.choice(VOCAB, size=3, replace=False).tolist(),
    )
