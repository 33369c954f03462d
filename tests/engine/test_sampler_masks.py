"""Masks of constrained rows in the device sampler: the last word for their own row, and nothing for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.sampler_runs import (
    SLOTS,
    VOCAB,
    prepare_slot,
    random_logits,
    tokens_of,
)
from helpers.sampling_reference import log_softmax, make_request
from tierax.engine.request import SamplingParams
from tierax.engine.sampler import sample
from tierax.engine.sampler_rows import MASK, pack_rows
from tierax.engine.sampler_state import (
    init_state,
)


def mask_of(allowed: Sequence[Sequence[int]], bucket: int) -> np.ndarray:
    bits = np.zeros((bucket, -(-VOCAB // 32) * 32), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, list(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_has_the_last_word_for_its_own_row(temperature: float) -> None:
    rng = np.random.default_rng(1)
    logits = random_logits(rng, 3)
    params = SamplingParams(temperature=temperature, logit_bias={5: 100.0}, presence_penalty=1.0, logprobs=2)
    requests = [make_request(params, slot=n, seed=n) for n in range(3)]
    allowed = [[31, 32, 319], [5], [7]]
    state = init_state(SLOTS, VOCAB)
    for request in requests:
        state = prepare_slot(state, request)
    rows = pack_rows([(request, len(request.tokens)) for request in requests], 4, SLOTS)
    rows.flags[:2] |= MASK  # pyright: ignore[reportIndexIssue]
    padded = np.concatenate([logits, logits[:1]])
    output, _ = sample(jnp.array(padded), rows, state, mask_of(allowed, 4))  # pyright: ignore[reportArgumentType]
    tokens = np.array(output.tokens)
    assert tokens[0] in allowed[0]
    if temperature == 0:
        assert tokens[0] == max(allowed[0], key=lambda token: logits[0, token])
    assert tokens[1] == 5
    assert tokens[2] == 5, "a row without the flag heeds its bias, and no mask"
    # Log-probs stay the model's own.
    assert float(output.logprobs[0]) == pytest.approx(log_softmax(logits[0])[tokens[0]], abs=1e-4)
    assert int(output.top_ids[0, 0]) == int(logits[0].argmax())


def test_a_mask_counts_where_nothing_else_is_asked_for() -> None:
    logits = random_logits(np.random.default_rng(3), 1)
    rows = pack_rows([(make_request(SamplingParams(temperature=0.0)), 3)], 1, SLOTS)
    rows.flags[:] |= MASK  # pyright: ignore[reportIndexIssue]
    output, _ = sample(jnp.array(logits), rows, init_state(SLOTS, VOCAB), mask_of([[8]], 1))  # pyright: ignore[reportArgumentType]
    assert int(output.tokens[0]) == 8


def test_a_mask_leaves_draws_as_the_model_shares_them_out() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1] + [1e-9] * 60))
    padded = np.tile(logits.astype(np.float32), (500, 1))
    rows = pack_rows([(make_request(SamplingParams(), seed=3), 3 + row) for row in range(500)], 500, SLOTS)
    rows.flags[:] |= MASK  # pyright: ignore[reportIndexIssue]
    mask = np.tile(np.array([0b1010, 0], np.int32), (500, 1))
    output, _ = sample(jnp.array(padded), rows, init_state(SLOTS, 64), mask)  # pyright: ignore[reportArgumentType]
    counts = Counter(np.array(output.tokens).tolist())
    assert set(counts) == {1, 3}
    assert 280 < counts[1] < 380


def test_a_row_draws_the_same_token_beside_masked_ones() -> None:
    rng = np.random.default_rng(2)
    logits = random_logits(rng, 4)
    requests = [make_request(SamplingParams(temperature=0.9, top_p=0.8), slot=n, seed=n) for n in range(4)]
    plain = tokens_of(logits, requests, 4)
    rows = pack_rows([(request, len(request.tokens)) for request in requests], 4, SLOTS)
    rows.flags[1] |= MASK  # pyright: ignore[reportIndexIssue]
    mask = mask_of([[], [9], [], []], 4)
    output, _ = sample(jnp.array(logits), rows, init_state(SLOTS, VOCAB), mask)  # pyright: ignore[reportArgumentType]
    assert np.array(output.tokens).tolist() == [plain[0], 9, plain[2], plain[3]]
