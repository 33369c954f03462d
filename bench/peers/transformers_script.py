"""transformers + torch in float32 with sdpa; run by an interpreter that has them, and knows nothing of tierax.

Reads a task from stdin and prints one line of JSON, see `peer`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    task = json.load(sys.stdin)
    torch.manual_seed(0)
    torch.set_num_threads(task["threads"])
    model = _load(task["model"])
    with torch.inference_mode():
        answer = {
            "decode": [_decode(model, task, batch, context) for batch, context in task["decode"]],
            "prefill": [_prefill(model, task, tokens) for tokens in task["prefill"]],
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "weights": "f32",
            "threads": torch.get_num_threads(),
        }
    print(json.dumps(answer))


def _load(path: str) -> Any:
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if path.endswith(".gguf"):
        folder, name = os.path.split(path)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, **options).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


def _prefill(model: Any, task: dict[str, Any], tokens: int) -> dict[str, Any]:
    ids = torch.randint(model.config.vocab_size, (1, tokens))

    def once() -> float:
        return tokens / _seconds(lambda: model(ids, use_cache=True, logits_to_keep=1))

    return {"tokens": tokens, **_repeated(once, task["repeats"])}


def _decode(model: Any, task: dict[str, Any], batch: int, context: int) -> dict[str, Any]:
    """A static batch with a KV cache; `context` is reached in the middle of the measured steps."""
    steps = task["steps"]
    ids = torch.randint(model.config.vocab_size, (batch, max(1, context - steps // 2)))

    def once() -> float:
        output = model(ids, use_cache=True, logits_to_keep=1)
        cache, next_ids = output.past_key_values, output.logits[:, -1:].argmax(-1)

        def step() -> None:
            nonlocal next_ids
            logits = model(next_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            next_ids = logits[:, -1:].argmax(-1)

        step()
        return batch * steps / _seconds(lambda: [step() for _ in range(steps)])

    return {"batch": batch, "context": context, **_repeated(once, task["repeats"])}


def _repeated(once: Callable[[], float], repeats: int) -> dict[str, float]:
    once()
    values = [once() for _ in range(repeats)]
    return {"tok_s": statistics.median(values), "tok_s_min": min(values), "tok_s_max": max(values)}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
