"""llama.cpp through the low-level calls of the `llama_cpp` package; for where its own benchmark programs are missing.

Reads a task from stdin and prints one line of JSON, see `peer`.
"""

from __future__ import annotations

import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

SETTLING_STEPS = 3
"""Before the clock runs, as with ours."""
MICRO_BATCH = 512
"""Tokens that go through the model at once, as llama.cpp's own programs do by default."""


def main() -> None:
    task = json.load(sys.stdin)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        task["model"].encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {task['model']}")
    answer = {
        "decode": [_decode(model, task, batch, context) for batch, context in task["decode"]],
        "prefill": [_prefill(model, task, tokens) for tokens in task["prefill"]],
        "versions": f"llama_cpp {llama_cpp.__version__}",
        "weights": "as in the file",
        "threads": task["threads"],
    }
    llama_cpp.llama_model_free(model)
    print(json.dumps(answer))


def _decode(model: Any, task: dict[str, Any], batch: int, context: int) -> dict[str, Any]:
    """Greedy decoding of `batch` sequences; `context` is reached in the middle of the measured steps.

    Several sequences can share one cache or have one each: the faster of the two counts.
    """
    rows = [_decode_with(model, task, batch, context, unified) for unified in (True, False)[: min(batch, 2)]]
    return {"batch": batch, "context": context, **max(rows, key=lambda row: row["tok_s"])}


def _decode_with(model: Any, task: dict[str, Any], batch: int, context: int, unified: bool) -> dict[str, Any]:
    steps = task["steps"]
    length = max(1, context - steps // 2 - SETTLING_STEPS)
    room = length + SETTLING_STEPS + steps
    with _Sequences.open(model, batch, room, task["threads"], unified) as sequences:
        first = [sequences.prefill(length)] * batch
        sequences.copy_first()

        def once() -> float:
            sequences.forget_after(length)
            tokens = first
            for step in range(SETTLING_STEPS):
                tokens = sequences.step(tokens, length + step)
            started = time.perf_counter()
            for step in range(SETTLING_STEPS, SETTLING_STEPS + steps):
                tokens = sequences.step(tokens, length + step)
            return batch * steps / (time.perf_counter() - started)

        return {**_repeated(once, task["repeats"]), "cache": "unified" if unified else "one per sequence"}


def _prefill(model: Any, task: dict[str, Any], tokens: int) -> dict[str, Any]:
    with _Sequences.open(model, 1, tokens, task["threads"], unified=True) as sequences:

        def once() -> float:
            sequences.forget_after(0)
            started = time.perf_counter()
            sequences.prefill(tokens)
            return tokens / (time.perf_counter() - started)

        return {"tokens": tokens, **_repeated(once, task["repeats"])}


def _repeated(once: Callable[[], float], repeats: int) -> dict[str, float]:
    once()
    values = [once() for _ in range(repeats)]
    return {"tok_s": statistics.median(values), "tok_s_min": min(values), "tok_s_max": max(values)}


class _Sequences:
    """Sequences that run together in one llama.cpp context."""

    def __init__(self, model: Any, context: Any, batch: Any, count: int) -> None:
        self._context = context
        self._batch = batch
        self._count = count
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._random = random.Random(0)

    @classmethod
    @contextmanager
    def open(cls, model: Any, count: int, room: int, threads: int, unified: bool) -> Iterator[_Sequences]:
        """`room` in tokens of one sequence."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = count * room
        params.n_batch = max(room, count)
        params.n_ubatch = MICRO_BATCH
        params.n_seq_max = count
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = unified
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {count} x {room} tokens")
        batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        try:
            yield cls(model, context, batch, count)
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    def prefill(self, length: int) -> int:
        """A random prompt in the first sequence; returns the token that follows."""
        prompt = self._random.choices(range(self._vocabulary), k=length)
        rows = [(token, place, 0, place == length - 1) for place, token in enumerate(prompt)]
        self._run(rows)
        return self._best(length - 1)

    def copy_first(self) -> None:
        """Gives every other sequence what the first one holds, in memory of its own."""
        size = llama_cpp.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, state, size, 0)
        for which in range(1, self._count):
            if not llama_cpp.llama_state_seq_set_data(self._context, state, size, which):
                raise RuntimeError(f"llama.cpp has no room for sequence {which} of {self._count}")

    def step(self, tokens: list[int], place: int) -> list[int]:
        """One token of every sequence, at `place` in each; returns those that follow."""
        self._run([(token, place, which, True) for which, token in enumerate(tokens)])
        return [self._best(row) for row in range(len(tokens))]

    def forget_after(self, length: int) -> None:
        """Cuts every sequence to its first `length` tokens."""
        memory = llama_cpp.llama_get_memory(self._context)
        for which in range(self._count):
            if not llama_cpp.llama_memory_seq_rm(memory, which, length, -1):
                raise RuntimeError(f"llama.cpp cannot cut a sequence to {length} tokens")

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """(token, place, sequence, logits wanted) by row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, place, which, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = place
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = which
            batch.logits[row] = wanted
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens gave {code}")

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())


if __name__ == "__main__":
    main()
