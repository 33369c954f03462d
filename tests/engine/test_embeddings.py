"""Embeddings: the exact mean of the last hidden states, through the same step as everything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.plain_forward import plain_hidden
from helpers.tiny_engine import Run, TinyDevice, TinyModel, output
from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, SamplingParams
from tierax.engine.reading import MeanHidden, PromptScores
from tierax.engine.request import Request

BUDGET = 16
PROMPTS = [list(range(40, 85)), [5], [9, 9, 9, 9], list(range(16)), list(range(17)), list(range(40, 60))]


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(stacked=True)


@pytest.fixture(scope="module")
def device(model: TinyModel) -> TinyDevice:
    return TinyDevice(model, 4, budget=BUDGET, coarse=True)


def embed(run: Run, prompt: list[int]) -> Request:
    return run.add(prompt, SamplingParams(max_tokens=0), reading=MeanHidden(len(prompt)))


def expect_exact(model: TinyModel, request: Request) -> None:
    mean = plain_hidden(model.params, model.config, list(request.tokens)).mean(0)
    assert isinstance(request.reading, MeanHidden)
    embedding = request.reading.embedding
    assert embedding == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    assert np.linalg.norm(embedding) == pytest.approx(1.0, abs=1e-6)
    assert (request.finish_reason, output(request)) == ("length", [])


def test_one_at_a_time_and_all_at_once(device: TinyDevice, model: TinyModel) -> None:
    for prompt in PROMPTS:
        run = device.run()
        request = embed(run, prompt)
        run.finish()
        expect_exact(model, request)
        assert len(run.deltas[request.id]) == 1
    run = device.run()
    requests = [embed(run, prompt) for prompt in PROMPTS]
    run.finish()
    for request in requests:
        expect_exact(model, request)
        assert request.cached_tokens == 0


def test_beside_other_work_and_after_it(device: TinyDevice, model: TinyModel) -> None:
    """What is generated and scored beside it is as without it; what the cache holds of a prompt changes nothing."""
    greedy, alone = SamplingParams(max_tokens=6, temperature=0.0), device.run()
    expected = alone.add(PROMPTS[0], greedy)
    alone.finish()
    run = device.run()
    for _ in range(2):
        generated = run.add(PROMPTS[0], greedy)
        scored = run.add(
            PROMPTS[0], SamplingParams(max_tokens=1, prompt_logprobs=0), reading=PromptScores(44, 0)
        )
        embedded = [embed(run, prompt) for prompt in PROMPTS]
        run.finish()
        assert output(generated) == output(expected)
        assert isinstance(scored.reading, PromptScores)
        assert len(scored.reading.logprobs) == 44
        for request in embedded:
            expect_exact(model, request)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory: Path = tmp_path_factory.mktemp("model")
    write_tiny_text_model(directory)
    options: dict[str, Any] = {"page_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 4}
    options |= {"context_length": 128, "device_cache_size": "8MiB"}
    with LLM(directory, skip_warmup=True, **options) as llm:
        yield llm


def test_llm_embeds(llm: LLM) -> None:
    first, same, other, empty, long = llm.embed(["hello", list(b"hello"), "world", "", "x" * 129])
    assert first.embedding is not None
    assert first.embedding.shape == (llm.engine.model_config.hidden_size,)
    assert first.embedding.dtype == np.float32
    assert same.embedding == pytest.approx(first.embedding, abs=1e-6)
    assert other.embedding is not None
    assert float(first.embedding @ other.embedding) < 0.9999
    assert (first.text, first.token_ids, first.prompt_token_ids) == ("", [], list(b"hello"))
    assert empty.embedding is long.embedding is None
    assert "empty" in (empty.error or "")
    assert "129 tokens" in (long.error or "")
    (single,) = llm.embed("x" * 128)
    assert single.embedding is not None


def test_llm_gives_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    first, again, short, bad = llm.generate(["hello there", list(b"hello there"), "x", ""], params)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [entry.token_id for entry in first.prompt_logprobs[1:] if entry] == list(b"ello there")
    assert all(len(entry.top) == 2 for entry in first.prompt_logprobs[1:] if entry)
    assert again.prompt_logprobs is not None
    close = zip(first.prompt_logprobs[1:], again.prompt_logprobs[1:], strict=True)
    assert all(a and b and a.logprob == pytest.approx(b.logprob, abs=1e-5) for a, b in close)
    assert short.prompt_logprobs == [None]
    assert (first.text, first.token_ids, first.finish_reason) == ("", [], "length")
    assert bad.error is not None
    plain = llm.generate("hello there", SamplingParams(max_tokens=1, temperature=0))[0]
    assert plain.prompt_logprobs is None
    with pytest.raises(ValueError, match="prompt_logprobs"):
        llm.generate("x", SamplingParams(prompt_logprobs=21))
    with pytest.raises(ValueError, match="max_tokens"):
        llm.generate("x", SamplingParams(max_tokens=0))


def test_the_end_token_is_no_part_of_what_a_script_gets(llm: LLM) -> None:
    """Not even where its log-prob is told, for those who score prompts."""
    (free,) = llm.generate("abc", SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    params.stop_token_ids = [free.token_ids[2]]
    (ended,) = llm.generate("abc", params)
    assert ended.finish_reason == "stop"
    assert [entry.token_id for entry in ended.logprobs or []] == ended.token_ids
