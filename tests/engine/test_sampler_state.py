"""What the sampler keeps on the device: history, biases, compiled programs, and that updates happen in place."""

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
    prepare_slot,
    random_logits,
    tokens_of,
    update,
)
from helpers.sampling_reference import make_request
from tierax.engine.request import SamplingParams
from tierax.engine.sampler import sample, threefry2x32
from tierax.engine.sampler_rows import bias_entries, pack_rows
from tierax.engine.sampler_state import (
    HISTORY_CHUNK,
    init_state,
    state_bytes,
    warm_up_updates,
)

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
