"""The actor class for Ray Data, over an engine that is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tierax import SamplingParams
from tierax.engine.offline import Choice, Output
from tierax.integrations.ray_data import Predictor


class FakeLLM:
    def __init__(self, model: str, **settings: Any) -> None:
        self.made_of = (model, settings)
        self.params: SamplingParams | None = None

    def generate(self, prompts: list[str], params: SamplingParams, *, use_tqdm: bool) -> list[Output]:
        assert not use_tqdm
        self.params = params
        return [self._output(prompt) for prompt in prompts]

    def chat(self, talks: list[Any], params: SamplingParams, *, use_tqdm: bool) -> list[Output]:
        return self.generate(
            [f"{talk[0]['role']}: {talk[0]['content']}" for talk in talks], params, use_tqdm=use_tqdm
        )

    def _output(self, prompt: str) -> Output:
        if not prompt:
            return Output([], [Choice()], error="The prompt is empty.")
        choice = Choice(text=prompt.upper(), token_ids=[1, 2], finish_reason="stop")
        return Output([5] * len(prompt), [choice], cached_tokens=len(prompt) - 1)


def test_rows_keep_their_columns_and_get_answers() -> None:
    made: list[FakeLLM] = []

    def make(model: str, **settings: Any) -> FakeLLM:
        made.append(FakeLLM(model, **settings))
        return made[0]

    predictor = Predictor("m", sampling={"max_tokens": 7}, engine={"page_size": 4}, make=make)
    batch = {"prompt": np.array(["ab", "", "c"]), "id": np.array([1, 2, 3])}
    rows = predictor(batch)
    assert [llm.made_of for llm in made] == [("m", {"page_size": 4})]
    assert made[0].params == SamplingParams(max_tokens=7)
    assert {name: column.tolist() for name, column in rows.items()} == {
        "prompt": ["ab", "", "c"],
        "id": [1, 2, 3],
        "text": ["AB", "", "C"],
        "finish_reason": ["stop", "", "stop"],
        "output_tokens": [2, 0, 2],
        "prompt_tokens": [2, 0, 1],
        "cached_tokens": [1, 0, 0],
        "error": ["", "The prompt is empty.", ""],
    }


def test_chat_and_another_column() -> None:
    predictor = Predictor(column="question", chat=True, make=FakeLLM)
    assert predictor({"question": np.array(["why"])})["text"].tolist() == ["USER: WHY"]
    with pytest.raises(KeyError, match="no column 'question'; there are a, b"):
        predictor({"b": np.array(["x"]), "a": np.array(["x"])})
