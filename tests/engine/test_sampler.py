"""The device sampler against a plain reference, and what must never change a row's token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.sampler_runs import (
    SLOTS,
    VOCAB,
    draw,
    random_logits,
    random_request,
    run,
    tokens_of,
)
from helpers.sampling_reference import choose, edited_logits, kept_probs, log_softmax, make_request
from tierax.engine.request import SamplingParams
from tierax.engine.sampler import LOGPROB_FLOOR, NUM_TOP, sample
from tierax.engine.sampler_rows import pack_rows
from tierax.engine.sampler_state import (
    init_state,
)

# --- the semantics


def test_tokens_equal_the_reference_for_random_options() -> None:
    rng = np.random.default_rng(1)
    state = init_state(SLOTS, VOCAB)
    compared = 0
    for _ in range(60):
        slots = rng.permutation(SLOTS)[:6]
        requests = [random_request(rng, int(slot)) for slot in slots]
        logits = random_logits(rng, 6)
        output, state = run(logits, requests, 8, state)
        for row, request in enumerate(requests):
            expected = choose(logits[row], request)
            if expected is not None:
                compared += 1
                assert output.tokens[row] == expected, request
    assert compared > 300


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "cool", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=24) * 1.5).astype(np.float32)
    expected = kept_probs(logits, params)
    draws = 20_000
    tokens = [draw(logits, params, seed=99, start=start) for start in range(3, draws + 3, 500)]
    counts = np.bincount(np.concatenate(tokens), minlength=24)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi2 = ((counts - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum()
    degrees = possible.sum() - 1
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)


def test_top_p_keeps_the_smallest_sufficient_set_and_always_the_best() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_p, kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        assert reached(logits, SamplingParams(temperature=1.0, top_p=top_p)) == set(range(kept))


def test_top_p_counts_within_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.2, 0.2 - 1e-4, 0.2 + 1e-4], np.float32))
    assert reached(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.66)) == {0}
    assert reached(logits, SamplingParams(temperature=1.0, top_p=0.66)) == {0, 1, 3}


def test_tied_tokens_stay_together() -> None:
    logits = np.array([2.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    assert reached(logits, SamplingParams(temperature=1.0, top_k=2)) == {0, 1, 2, 3}


def reached(logits: np.ndarray, params: SamplingParams) -> set[int]:
    return set(draw(logits, params).tolist())


def test_greedy_takes_the_lowest_id_of_ties_in_every_width() -> None:
    for vocab_size in (7, 1000, 1536):
        logits = np.zeros((3, vocab_size), np.float32)
        logits[0, [vocab_size // 2, vocab_size - 1]] = 1.0
        logits[1, vocab_size - 1] = 1.0
        requests = [make_request(SamplingParams(temperature=0.0), slot=slot) for slot in range(3)]
        assert tokens_of(logits, requests, 4) == [vocab_size // 2, vocab_size - 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_safe(temperature: float) -> None:
    rng = np.random.default_rng(4)
    logits = rng.permutation(np.linspace(-60, 60, VOCAB)).astype(np.float32)[None]
    logits[0, rng.permutation(VOCAB)[: VOCAB // 2]] = -np.inf
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=40, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=temperature, repetition_penalty=1.3, logprobs=5),
    ):
        output, _ = run(logits, [make_request(params)], 1)
        assert output.tokens[0] == edited_logits(logits[0], make_request(params)).argmax()
        assert np.isfinite(output.logprobs).all()


def test_huge_temperature_is_uniform_over_possible_tokens() -> None:
    logits = np.full(64, -np.inf, np.float32)
    logits[10:30] = np.linspace(-60, 60, 20)
    assert reached(logits, SamplingParams(temperature=1e9)) == set(range(10, 30))


def test_min_tokens_forbids_end_tokens_only_until_reached() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 7], logits[0, 9] = 9.0, 1.0
    # With a bias of its own, the request's table stays in use after `min_tokens`.
    for bias in ({}, {100: -1.0}):
        params = SamplingParams(temperature=0.0, min_tokens=2, logit_bias=bias)
        outputs = [[5] * done for done in range(4)]
        requests = [make_request(params, output=output, stop_ids=[7]) for output in outputs]
        assert [tokens_of(logits, [request], 1)[0] for request in requests] == [9, 9, 7, 7]


# --- independence


def test_a_row_depends_on_its_own_seed_position_and_logits_only() -> None:
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 8)
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.9, top_k=30, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.02, frequency_penalty=0.7),
    ):
        target = make_request(params, output=[4, 4, 5], seed=42, slot=3)
        alone = tokens_of(logits[:1], [target], 1)[0]
        for bucket, place in ((4, 0), (8, 0), (8, 5)):
            others = [random_request(rng, slot) for slot in (0, 1, 2, 4, 5, 6, 7)][: bucket - 1]
            requests = [*others[:place], target, *others[place:]]
            batch = random_logits(rng, bucket)
            batch[place] = logits[0]
            assert tokens_of(batch, requests, bucket)[place] == alone
        assert tokens_of(logits[:1], [target], 8)[0] == alone


def test_seeds_and_positions_give_different_streams_that_repeat() -> None:
    params = SamplingParams(temperature=1.0)
    seeds = [7, 8, 7 + 2**32, 2**63 + 7, -1]
    streams = [draw(np.zeros(64), params, seed) for seed in seeds]
    for index, stream in enumerate(streams):
        np.testing.assert_array_equal(stream, draw(np.zeros(64), params, seeds[index]))
        assert len(set(stream.tolist())) == 64
        for other in streams[:index]:
            assert (stream == other).mean() < 0.05


def test_penalties_see_real_tokens_only() -> None:
    rng = np.random.default_rng(6)
    logits = random_logits(rng, 2)
    logits[:, 0] = 30.0
    params = SamplingParams(temperature=0.0, frequency_penalty=1.05, repetition_penalty=1.5)
    short = make_request(params, prompt=[3] * 5, output=[6, 6], slot=0)
    long = make_request(SamplingParams(temperature=0.0), prompt=[8] * 60, slot=1)
    output, state = run(logits, [short, long], 8)
    assert output.tokens[:2].tolist() == [0, 0]
    assert tokens_of(logits[:1], [short], 1) == [0]
    counts = np.array(state.output_counts)
    assert counts.sum() == 3
    assert (counts[0, 6], counts[0, 0]) == (2, 1)
    assert np.array(state.prompt_seen).sum() == 1


def test_padded_rows_write_nothing() -> None:
    state = init_state(SLOTS, VOCAB)
    before = [np.array(leaf) for leaf in state]
    _, state = sample(jnp.ones((4, VOCAB)), pack_rows([], 4, SLOTS), state)
    for old, new in zip(before, state, strict=True):
        np.testing.assert_array_equal(old, np.array(new))


def test_nan_and_infinite_logits_give_valid_tokens_and_finite_logprobs() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[0] = np.nan
    logits[1, :300] = np.nan
    logits[2, 5] = np.inf
    logits[3] = -np.inf
    for params in (
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(temperature=1.0, top_k=10, top_p=0.9, repetition_penalty=1.2, logprobs=5),
    ):
        output, _ = run(logits, [make_request(params, slot=slot) for slot in range(4)], 4)
        assert output.tokens[0] == 0
        assert output.tokens[1] >= 300
        assert output.tokens[2] == 5
        assert output.tokens[3] == 0
        assert np.isfinite(output.logprobs).all()
        assert np.isfinite(output.top_logprobs).all()
        assert output.logprobs[0] == LOGPROB_FLOOR


# --- log-probs


def test_logprobs_are_of_the_raw_distribution_and_per_row() -> None:
    rng = np.random.default_rng(7)
    logits = random_logits(rng, 4)
    biased = {int(logits[1].argmin()): 100.0}
    requests = [
        make_request(SamplingParams(temperature=0.0, logprobs=3), slot=0),
        make_request(SamplingParams(temperature=0.0, logprobs=5, logit_bias=biased), slot=1),
        make_request(SamplingParams(temperature=0.5, top_k=3, logprobs=0), slot=2),
        make_request(SamplingParams(temperature=0.0), slot=3),
    ]
    output, _ = run(logits, requests, 8)
    for row in range(4):
        raw = log_softmax(logits[row])
        expected = raw[output.tokens[row]] if row < 3 else 0.0
        assert output.logprobs[row] == pytest.approx(expected, abs=1e-5)
        if row < 2:
            best = np.argsort(-raw, kind="stable")[:NUM_TOP]
            assert output.top_ids[row].tolist() == best.tolist()
            np.testing.assert_allclose(output.top_logprobs[row], raw[best], atol=1e-5)
        else:
            assert not output.top_ids[row].any()
    assert output.top_ids.shape == output.top_logprobs.shape == (8, NUM_TOP)
    assert output.top_ids[0, 0] == output.tokens[0]
    assert output.tokens[1] == logits[1].argmin()


def test_small_vocabularies_report_what_they_have() -> None:
    logits = np.array([[0.0, 2.0, 1.0]], np.float32)
    output, _ = run(logits, [make_request(SamplingParams(temperature=0.0, logprobs=3), prompt=[0])], 1)
    assert output.top_ids.tolist() == [[1, 2, 0]]
