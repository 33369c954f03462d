"""The demo model against reference values made with transformers (tests/golden/make_golden.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tierax import LLM, Output, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = json.loads((GOLDEN / "demo.json").read_text(encoding="utf-8"))
VALUES = np.load(GOLDEN / "demo.npz")
GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, logprobs=0)
ALONE = [0, 2, 5, 8, 11, 14]
"""Of one token, emoji, a chat, a long chat, code, 512 English tokens."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo",
        dtype="f32",
        context_length=2048,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        skip_warmup=True,
    ) as llm:
        yield llm


def _check(output: Output, index: int) -> int:
    """Asserts tokens and log-probs of golden prompt `index`; returns the number of positions compared.

    After a position where the reference's two likeliest candidates lie within 1e-3 rounding decides, so nothing
    beyond is compared.
    """
    assert output.error is None
    assert output.logprobs is not None
    near = np.flatnonzero(VALUES["gaps"][index] < 1e-3)
    count = int(near[0]) if near.size else GREEDY.max_tokens
    assert output.token_ids[:count] == VALUES["tokens"][index, :count].tolist()
    ours = np.array([entry.logprob for entry in output.logprobs[:count]])
    np.testing.assert_allclose(ours, VALUES["logprobs"][index, :count], atol=1e-3, rtol=0)
    return count


def test_all_prompts_together_then_some_from_the_cache_and_alone(llm: LLM) -> None:
    ids = [prompt["ids"] for prompt in PROMPTS]
    assert len(ids) == 20
    outputs = llm.generate(ids, GREEDY)
    compared = [_check(output, index) for index, output in enumerate(outputs)]
    assert sum(compared) > 0.9 * 20 * 64
    assert [output.prompt_token_ids for output in outputs] == ids

    page = llm.engine.cache.page_size
    for index in ALONE:
        (warm,) = llm.generate([ids[index]], GREEDY)
        _check(warm, index)
        assert warm.cached_tokens == (len(ids[index]) - 1) // page * page

    for index in ALONE:
        llm.engine.cache.clear()
        (cold,) = llm.generate([ids[index]], GREEDY)
        _check(cold, index)
        assert cold.cached_tokens == 0


def test_text_gives_the_reference_ids(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    whole = [prompt for prompt in PROMPTS if prompt["text"] is not None]
    assert len(whole) > 10
    for prompt in whole:
        assert tokenizer.encode(prompt["text"], add_bos=tokenizer.add_bos) == prompt["ids"]


def test_turn_two_of_a_chat_reuses_turn_one(llm: LLM) -> None:
    params = SamplingParams(max_tokens=48, temperature=0)
    messages = [{"role": "user", "content": "Name three rivers of Europe, with a sentence about each."}]
    (first,) = llm.chat(messages, params)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Which is the longest of them?"},
    ]
    (second,) = llm.chat(messages, params)
    known = len(first.prompt_token_ids) + len(first.token_ids)
    assert second.prompt_token_ids[:known] == first.prompt_token_ids + first.token_ids
    assert second.cached_tokens >= known - llm.engine.cache.page_size
    assert second.text
