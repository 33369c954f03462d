"""Weights of fewer bits: the engine answers about as with f32, from the cache as without, and keeps their KV apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, Output, SamplingParams

PAGE = 4
OPTIONS: dict[str, Any] = {
    "page_size": PAGE,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "context_length": 128,
    "device_cache_size": "1MiB",
    "skip_warmup": True,
}
FORMATS: dict[str, dict[str, Any]] = {"bf16": {"dtype": "bf16"}, "int8": {"quantization": "int8"}}
# Where there is no native library `auto` is `xla`, and `make test-without-native` runs that.
BACKENDS = ("auto", pytest.param("xla", marks=pytest.mark.slow))
PROMPT = list(b"The ferry to the island left at six, and the quay was full by half past five.")
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_text_model(directory)
    return directory


def _first_logprob(answer: Output) -> float:
    assert answer.logprobs is not None
    return answer.logprobs[0].logprob


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_answers_are_close_to_those_of_f32_and_the_cache_changes_none(
    model: Path, name: str, backend: str
) -> None:
    with LLM(model, **OPTIONS, attention_backend=backend) as llm:
        plain_bytes = llm.engine.weight_bytes
        expected = llm.generate([PROMPT], GREEDY)[0]
    with LLM(model, **OPTIONS, attention_backend=backend, **FORMATS[name]) as llm:
        assert llm.engine.weight_bytes < 0.55 * plain_bytes
        assert (llm.engine.activations, llm.engine.kv_dtype) == ("f32", "f32")
        cold, again = (llm.generate([PROMPT], GREEDY)[0] for _ in range(2))
        # Beside others, and cut otherwise.
        beside = llm.generate([PROMPT[::-1], PROMPT, PROMPT[:30]], GREEDY)[1]
    assert (cold.cached_tokens, again.cached_tokens) == (0, (len(PROMPT) - 1) // PAGE * PAGE)
    assert cold.token_ids == again.token_ids == beside.token_ids
    difference = abs(_first_logprob(cold) - _first_logprob(expected))
    assert 0 < difference < 0.2


def test_kv_of_one_format_is_not_used_by_another(model: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"host_disk_cache_dir": str(tmp_path / "disk"), "host_cache_size": "1MiB"}
    cached = []
    for name in ("bf16", "int8", "int8"):
        with LLM(model, **options, **FORMATS[name]) as llm:
            cached.append(llm.generate([PROMPT], GREEDY)[0].cached_tokens)
    np.testing.assert_array_equal(cached, [0, 0, (len(PROMPT) - 1) // PAGE * PAGE])
