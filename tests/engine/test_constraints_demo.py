"""Constraints on the small real model: its large vocabulary, and text that it would rather not write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tierax import LLM, Constraint, SamplingParams

pytestmark = pytest.mark.slow
ARTICLE = r'\{.*?"answer":\s*".*?",\s*"confidence":\s*\d+\}'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {
        "max_num_seqs": 8,
        "context_length": 512,
        "device_cache_size": "128MiB",
        "host_cache_size": "0",
    }
    with LLM("demo", skip_warmup=True, use_tqdm=False, **options) as llm:
        yield llm


def test_every_text_matches_or_says_length(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    checks = [
        (Constraint.regex(ARTICLE), lambda text: re.fullmatch(ARTICLE, text)),
        (Constraint.json_schema(schema), lambda text: list(json.loads(text)) == ["city", "size"]),
        (Constraint.choice(["red", "green", "blue"]), lambda text: text in ("red", "green", "blue")),
        (
            Constraint.grammar('root ::= "(" ("a" | root) ")"'),
            lambda text: text.count("(") == text.count(")"),
        ),
    ]
    prompts, params = [], []
    for number in range(8):
        prompts.append(f"Tell me about city number {number}, and why you like it.")
        params.append(
            SamplingParams(max_tokens=60, temperature=0.9, seed=number, constraint=checks[number % 4][0])
        )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for number, output in enumerate(outputs):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            assert checks[number % 4][1](output.text), output.text
    assert sum(output.finish_reason == "stop" for output in outputs) >= 4, "schema and choices end"


def test_forced_text_is_in_the_models_usual_tokens_jumped_or_not(llm: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    constraint = Constraint.regex(f"[AB]: {re.escape(text)}")
    jumped_before = llm.engine.stats.jumped_tokens
    params = [
        SamplingParams(max_tokens=40, temperature=0, constraint=constraint, logprobs=k) for k in (None, 0)
    ]
    jumping, stepping = llm.generate(["Say:"] * 2, params, use_tqdm=False)
    assert jumping.text[3:] == stepping.text[3:] == text
    assert jumping.token_ids == stepping.token_ids
    assert llm.engine.stats.jumped_tokens - jumped_before >= 8
    usual = llm.engine.tokenizer.encode(" " + text, add_bos=False)
    assert jumping.token_ids[-len(usual) + 1 :] == usual[1:]
