"""Settings of a small `LLM`, and what of its outputs is compared."""

from __future__ import annotations

from typing import Any

from tierax import Output, SamplingParams

OPTIONS: dict[str, Any] = {
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "context_length": 128,
    "device_cache_size": "8MiB",
    "skip_warmup": True,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def numbers(output: Output) -> tuple[Any, ...]:
    """All of an output that must not depend on the cache."""
    return (output.prompt_token_ids, [(c.text, c.token_ids, c.finish_reason) for c in output.choices])
