"""A model in a Ray Data pipeline: rows with a prompt in, rows with its answer out. Needs no Ray to be imported.

from tierax.integrations.ray_data import Predictor, by_prefix

rows = by_prefix(ray.data.read_parquet("questions"), "prompt")
rows = rows.map_batches(
    Predictor,
    fn_constructor_kwargs={"model": "demo", "sampling": {"max_tokens": 64, "temperature": 0.0}},
    batch_size=256,
    concurrency=2,
)
rows.write_parquet("answers")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..engine.request import SamplingParams


class Predictor:
    """Completes a column of prompts. An actor class for `ray.data.Dataset.map_batches`: one engine for all its batches."""

    def __init__(
        self,
        model: str = "demo",
        *,
        column: str = "prompt",
        chat: bool = False,
        sampling: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        make: Callable[..., Any] | None = None,
    ) -> None:
        """`column`: texts; with `chat`, what a user says, to be put through the chat template. `sampling` is for
        `SamplingParams`, `engine` for `LLM`, or for what stands in its place (`make`). Raises `ConfigError` or `ParameterError` for what cannot
        be used.
        """
        self._column = column
        self._chat = chat
        self._params = SamplingParams(**(sampling or {}))
        if make is None:
            # Where the pipeline is put together, no engine is needed.
            from ..engine.llm import LLM as make
        self._llm = make(model, **(engine or {}))

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Adds the columns `text`, `finish_reason`, `output_tokens`, `prompt_tokens`, `cached_tokens` and `error`.

        A prompt that cannot be answered has an empty text and says why in `error`, which is empty for all others. Raises
        KeyError when the column of prompts is missing.
        """
        if self._column not in batch:
            raise KeyError(f"there is no column {self._column!r}; there are {', '.join(sorted(batch))}")
        prompts = [str(prompt) for prompt in batch[self._column]]
        if self._chat:
            talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = self._llm.chat(talks, self._params, use_tqdm=False)
        else:
            outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        columns = {
            "text": [output.text for output in outputs],
            "finish_reason": [output.finish_reason or "" for output in outputs],
            "output_tokens": [len(output.token_ids) for output in outputs],
            "prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
            "cached_tokens": [output.cached_tokens for output in outputs],
            "error": [output.error or "" for output in outputs],
        }
        return {**batch, **{name: np.array(values) for name, values in columns.items()}}


def by_prefix(dataset: Any, column: str = "prompt") -> Any:
    """The rows of a Ray dataset sorted by a column of texts: those that begin alike lie in one block then, which one actor
    gets, and their beginning is computed once."""
    return dataset.sort(column)
