"""llama.cpp through the `llama_cpp` package: one sequence; for where its own benchmark programs are missing.

Reads a task from stdin and prints one line of JSON, see `peer`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]


def main() -> None:
    task = json.load(sys.stdin)
    singles = [context for batch, context in task["decode"] if batch == 1]
    longest = max([*singles, *task["prefill"]]) + task["steps"] + 8
    model = llama_cpp.Llama(
        task["model"], n_ctx=longest, n_batch=512, n_threads=task["threads"], verbose=False
    )
    answer = {
        "decode": [{"batch": 1, "context": c, **_repeated(model, task, c, decode=True)} for c in singles],
        "prefill": [{"tokens": n, **_repeated(model, task, n, decode=False)} for n in task["prefill"]],
        "versions": f"llama_cpp {llama_cpp.__version__}",
        "weights": "as in the file",
        "threads": task["threads"],
    }
    print(json.dumps(answer))


def _repeated(model: Any, task: dict[str, Any], tokens: int, *, decode: bool) -> dict[str, float]:
    values = [_once(model, task["steps"], tokens, decode) for _ in range(task["repeats"] + 1)][1:]
    return {"tok_s": statistics.median(values), "tok_s_min": min(values), "tok_s_max": max(values)}


def _once(model: Any, steps: int, tokens: int, decode: bool) -> float:
    count = max(1, tokens - steps // 2) if decode else tokens
    model.reset()
    started = time.perf_counter()
    model.eval(random.choices(range(model.n_vocab()), k=count))
    token = model.sample(temp=0.0)
    if not decode:
        return tokens / (time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(steps):
        model.eval([token])
        token = model.sample(temp=0.0)
    return steps / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
