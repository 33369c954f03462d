"""fp8 KV in the engine: how much fits, and that the cache is as invisible as with f32 KV.

Quantising amplifies rounding: where two sums differ in their last bit, a code may fall on the other side of a boundary,
by a step of 6 %. What is computed by programs of the same arithmetic is therefore compared to the bit, and what is not
(prefill against decode, or different padding) within a tolerance that is far below what quantising itself changes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers.tiny_engine import Run, TinyDevice, TinyModel, output
from tierax import LLM, Output, SamplingParams
from tierax.engine.request import Request

PROMPTS = [
    prompt["ids"]
    for prompt in json.loads((Path(__file__).parents[1] / "golden/demo.json").read_text(encoding="utf-8"))
]
PAGE = 16
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=2)


# --- a tiny model


@pytest.fixture(scope="module")
def device() -> TinyDevice:
    """Chunks of a page: what the cache leaves to compute of a prompt, a cold run computes by the same program."""
    return TinyDevice(TinyModel(stacked=True), 8, budget=8, seqs=4, coarse=True, kv_fp8=True)


def _said(run: Run, request: Request) -> tuple[list[int], list[float]]:
    deltas = run.deltas[request.id]
    return output(request), [entry.logprob for delta in deltas for entry in delta.logprobs or ()]


def test_a_cached_run_is_the_cold_run_to_the_bit(device: TinyDevice) -> None:
    rng = random.Random(5)
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    for length in (1, 7, 8, 9, 16, 17, 40, 63):
        prompt = [rng.randrange(256) for _ in range(length)]
        run = device.run()
        cold = run.add(prompt, params)
        run.finish()
        again = run.add(prompt, params)
        run.finish()
        assert cold.cached_tokens == 0
        assert again.cached_tokens == (length - 1) // 8 * 8
        assert _said(run, again) == _said(run, cold)
        assert len(_said(run, cold)[1]) == 12


def test_a_hit_changes_no_byte_of_a_shared_page(device: TinyDevice) -> None:
    run = device.run()
    prompt = [(5 * n) % 251 for n in range(30)]
    run.add(prompt)
    run.finish()
    before = np.array(device.pool.array)
    again = run.add([*prompt[:24], 7, 9, 11])
    run.finish()
    assert again.cached_tokens == 24
    changed = (np.array(device.pool.array) != before).reshape(len(before), -1).any(1)
    assert 1 <= changed[:-1].sum() <= 2, "pages of the tail and of what was generated, and no other"


def test_a_page_does_not_depend_on_what_came_later(device: TinyDevice) -> None:
    """The prefix's pages are the same bytes, whether the prompt ends with them or goes on."""
    prompt = [(11 * n) % 249 for n in range(16)]
    found = []
    for rest in ([1], [250] * 17):
        run = device.run()
        request = run.add([*prompt, *rest], SamplingParams(max_tokens=1, temperature=0.0))
        run.step()
        run.step()
        assert request.lease is not None
        pages = list(request.lease.pages[:2])
        run.finish()
        found.append(np.array(device.pool.array)[pages])
    np.testing.assert_array_equal(*found)
    assert found[0].any()


# --- the demo model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo",
        dtype="f32",
        kv_cache_dtype="fp8",
        page_size=PAGE,
        context_length=1024,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        device_cache_size="64MiB",
        skip_warmup=True,
    ) as llm:
        yield llm


def test_it_holds_three_and_a_half_times_the_tokens_of_f32(llm: LLM) -> None:
    f32_page = llm.engine.model_config.kv_bytes_per_token(4) * PAGE
    in_f32 = (64 << 20) // f32_page - 1
    assert llm.engine.cache.capacity_tokens // PAGE >= 3.5 * in_f32
    assert llm.engine.page_bytes * 3.5 < f32_page


def _logprobs(answer: Output) -> np.ndarray:
    assert answer.logprobs is not None
    return np.array([entry.logprob for entry in answer.logprobs])


@pytest.mark.parametrize("index", [5, 11, 14])
def test_a_cached_prompt_is_answered_as_the_cold_one(llm: LLM, index: int) -> None:
    ids = PROMPTS[index]
    cold, again = (llm.generate([ids], GREEDY)[0] for _ in range(2))
    assert (cold.cached_tokens, again.cached_tokens) == (0, (len(ids) - 1) // PAGE * PAGE)
    assert again.cached_tokens >= 2 * PAGE
    assert again.token_ids == cold.token_ids
    np.testing.assert_allclose(_logprobs(again), _logprobs(cold), atol=1e-3, rtol=0)


def test_pages_that_decoding_made_serve_the_next_turn(llm: LLM) -> None:
    """Decode's sums round otherwise than prefill's, so this is close, not equal."""
    ids = PROMPTS[8]
    answer = llm.generate([ids], GREEDY)[0]
    known = 20
    turn = llm.generate([ids + answer.token_ids[:known]], GREEDY)[0]
    assert turn.cached_tokens == (len(ids) + known - 1) // PAGE * PAGE > len(ids)
    assert answer.logprobs is not None
    compared = 0
    for ours, theirs in zip(turn.logprobs or [], answer.logprobs[known:], strict=False):
        first, second = (logprob for _, logprob in theirs.top[:2])
        if first - second < 0.2:
            break
        assert ours.token_id == theirs.token_id
        assert abs(ours.logprob - theirs.logprob) < 0.1
        compared += 1
    assert compared >= 3
