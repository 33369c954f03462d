"""The sampler's semantics for one token, in plain float64 NumPy with sorting: slow, obvious, shared by tests."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jax.extend.random import threefry_2x32

from tierax.engine.request import Request, SamplingParams


def make_request(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    seed: int = 0,
    slot: int = 0,
    stop_ids: Sequence[int] = (),
) -> Request:
    tokens = array("i", [*prompt, *output])
    return Request("r", tokens, len(prompt), params, seed, frozenset(stop_ids), 10_000, slot=slot)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def edited_logits(logits: np.ndarray, request: Request) -> np.ndarray:
    """Logits f64[V] after penalties, biases and `min_tokens`."""
    params = request.params
    result = logits.astype(np.float64)
    for token in set(request.tokens):
        value = result[token]
        result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(request.tokens[request.num_prompt :]).items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        result[token] += bias
    if request.num_output < params.min_tokens:
        result[list(request.stop_ids)] = -np.inf
    return result


def kept_probs(logits: np.ndarray, params: SamplingParams, top_p: float | None = None) -> np.ndarray:
    """Probabilities f64[V] after temperature, top_k, top_p (or the one given) and min_p, renormalised."""
    probs = np.exp(log_softmax((logits - logits.max()) / params.temperature))
    order = np.argsort(-probs, kind="stable")
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0.0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= (params.top_p if top_p is None else top_p)]] = 0.0
    probs[probs < params.min_p * probs.max()] = 0.0
    return probs / probs.sum()


def gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Noise f64[V] of one token: Threefry of the token id under Threefry of the position under the seed."""

    def cipher(key: Sequence[int], counters: np.ndarray) -> np.ndarray:
        words = np.concatenate([counters, np.zeros_like(counters)]).astype(np.uint32)
        return np.asarray(threefry_2x32(np.array(key, np.uint32), words)).reshape(2, -1)

    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    step_key = cipher((low, high), np.array([position]))[:, 0]
    bits = cipher((step_key[0], step_key[1]), np.arange(vocab_size))[0]
    uniform = np.minimum((bits + 0.5) / 2.0**32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-uniform))


def choose(logits: np.ndarray, request: Request) -> int | None:
    """The token that must be sampled; None where rounding may decide between the two best."""
    params = request.params
    scores = edited_logits(logits, request)
    if params.temperature > 1e-5:
        noise = gumbel(request.seed, len(request.tokens), len(logits))
        kept, *near = (kept_probs(scores, params, params.top_p + delta) > 0 for delta in (0, -1e-5, 1e-5))
        if params.top_p < 1 and any((kept != other).any() for other in near):
            return None
        scores = np.where(kept, (scores - scores.max()) / params.temperature + noise, -np.inf)
    second, best = np.sort(scores)[-2:]
    return int(scores.argmax()) if best - second > 1e-3 else None
