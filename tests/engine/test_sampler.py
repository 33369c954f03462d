"""The device sampler against a plain reference, and what must never change a row's token."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.sampler_runs import (
    SLOTS,
    VOCAB,
    draw,
    prepare_slot,
    random_logits,
    random_request,
    run,
    tokens_of,
    update,
)
from helpers.sampling_reference import choose, edited_logits, kept_probs, log_softmax, make_request
from tierax.engine.request import SamplingParams
from tierax.engine.sampler import LOGPROB_FLOOR, NUM_TOP, sample, threefry2x32
from tierax.engine.sampler_rows import bias_entries, pack_rows
from tierax.engine.sampler_state import (
    HISTORY_CHUNK,
    init_state,
    state_bytes,
    warm_up_updates,
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


# --- state


def test_history_longer_than_a_chunk_and_reuse_of_a_slot() -> None:
    rng = np.random.default_rng(8)
    prompt = rng.integers(0, VOCAB // 2, size=2 * HISTORY_CHUNK + 17).tolist()
    generated = rng.integers(0, VOCAB, size=HISTORY_CHUNK + 1).tolist()
    params = SamplingParams(presence_penalty=0.5)
    state = init_state(SLOTS, VOCAB)
    state = prepare_slot(state, make_request(params, prompt=[300], output=[301], slot=4))
    state = prepare_slot(state, make_request(params, prompt=prompt, output=generated, slot=4))
    counts, seen = np.array(state.output_counts), np.array(state.prompt_seen)
    assert {i: c for i, c in enumerate(counts[4].tolist()) if c} == dict(Counter(generated))
    assert set(np.flatnonzero(seen[4]).tolist()) == set(prompt)
    assert counts.sum() == len(generated)
    assert seen.sum() == len(set(prompt))


def test_sampled_tokens_join_the_history_and_feed_the_next_step() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :4] = [1.0, 0.9, 0.8, 0.7]
    request = make_request(SamplingParams(temperature=0.0, presence_penalty=0.5), slot=2)
    state = prepare_slot(init_state(SLOTS, VOCAB), request)
    chosen = []
    for position in range(3, 7):
        output, state = sample(jnp.array(logits), pack_rows([(request, position)], 1, SLOTS), state)
        chosen.append(int(output.tokens[0]))
        assert int(state.last_tokens[2]) == chosen[-1]
    assert chosen == [0, 1, 2, 3]


def test_resuming_with_history_equals_going_on() -> None:
    rng = np.random.default_rng(9)
    logits = random_logits(rng, 1)
    params = SamplingParams(temperature=0.8, frequency_penalty=0.9, repetition_penalty=1.1)
    request = make_request(params, seed=11, slot=1)
    state = prepare_slot(init_state(SLOTS, VOCAB), request)
    for _ in range(12):
        output, state = sample(
            jnp.array(logits), pack_rows([(request, len(request.tokens))], 1, SLOTS), state
        )
        resumed = replace(request, slot=6)
        assert tokens_of(logits, [resumed], 4) == [int(output.tokens[0])]
        request.tokens.append(int(output.tokens[0]))


def test_bias_tables_refuse_what_does_not_fit() -> None:
    def entries(params: SamplingParams, stop_ids: Sequence[int] = ()) -> object:
        return bias_entries(make_request(params, stop_ids=stop_ids), VOCAB, max_bias=4)

    assert entries(SamplingParams()) is None
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match=rf"token ids \[{token}\] lie outside the vocabulary of {VOCAB}"):
            entries(SamplingParams(logit_bias={token: 5.0}))
    with pytest.raises(ValueError, match="5 logit biases and end tokens exceed the limit of 4"):
        entries(SamplingParams(min_tokens=1, logit_bias={1: 1.0, 2: 1.0}), stop_ids=[7, 8, 9])
    with pytest.raises(ValueError, match="2 rows to sample do not fit a bucket of 1"):
        pack_rows([(make_request(SamplingParams()), 3)] * 2, 1, SLOTS)


# --- compilation and memory


@contextmanager
def counting_compiles() -> Iterator[list[str]]:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_one_compiled_program_per_bucket_serves_every_option() -> None:
    rng = np.random.default_rng(10)
    vocab_size = 331
    logits = jnp.array(random_logits(rng, 4, vocab_size))
    with counting_compiles() as compiled:
        state = update(init_state(SLOTS, vocab_size), warm_up_updates(SLOTS))
        _, state = sample(logits, pack_rows([], 4, SLOTS), state)
        assert compiled
        compiled.clear()
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1),
            SamplingParams(frequency_penalty=1.0, presence_penalty=1.0, repetition_penalty=1.2),
            SamplingParams(logit_bias={3: 1.0}, min_tokens=4),
            SamplingParams(logprobs=0),
            SamplingParams(logprobs=20),
        ):
            for count in (1, 4):
                requests = [
                    make_request(params, prompt=[1] * 1500, output=[2], slot=slot, stop_ids=[5])
                    for slot in range(count)
                ]
                for request in requests:
                    state = prepare_slot(state, request)
                rows = pack_rows([(request, 1501) for request in requests], 4, SLOTS)
                _, state = sample(logits, rows, state)
        assert compiled == []


def test_wide_batches_are_split_and_the_state_is_updated_in_place() -> None:
    slots, vocab_size = 64, 1 << 18
    state = init_state(slots, vocab_size, max_bias=4)
    assert sum(leaf.nbytes for leaf in state) == state_bytes(slots, vocab_size, max_bias=4)
    rng = np.random.default_rng(12)
    logits = jnp.array(random_logits(rng, 8, vocab_size))
    params = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=1.0, logprobs=2)
    requests = [make_request(params, seed=slot, slot=slot) for slot in range(8)]
    rows = pack_rows([(request, 3) for request in requests], 8, slots)
    memory = sample.lower(logits, rows, state).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= state_bytes(slots, vocab_size, max_bias=4)
    assert memory.temp_size_in_bytes < state_bytes(slots, vocab_size, max_bias=4) // 2
    together, _ = sample(logits, rows, state)
    for row in (0, 5):
        alone = pack_rows([(requests[row], 3)], 1, slots)
        single, _ = sample(logits[row : row + 1], alone, init_state(slots, vocab_size, max_bias=4))
        assert single.tokens[0] == together.tokens[row]
        assert single.top_ids[0].tolist() == together.top_ids[row].tolist()
        np.testing.assert_allclose(single.top_logprobs[0], together.top_logprobs[row], atol=1e-5)


def test_every_update_consumes_its_state() -> None:
    state = init_state(SLOTS, VOCAB)
    logits, rows = jnp.zeros((4, VOCAB)), pack_rows([], 4, SLOTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        old = state
        _, state = sample(logits, rows, state)
        assert all(leaf.is_deleted() for leaf in old)
        old, state = state, update(state, warm_up_updates(SLOTS))
        assert all(leaf.is_deleted() for leaf in old)


def test_threefry_matches_the_published_vectors() -> None:
    cases = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, expected in cases:
        words = [jnp.uint32(word) for word in (*key, *counter)]
        assert tuple(map(int, threefry2x32((words[0], words[1]), (words[2], words[3])))) == expected
