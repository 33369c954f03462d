"""Tokens that stand for a trace's blocks: a block is its id, over and over, so equal prefixes are equal tokens."""

from __future__ import annotations

from array import array

import numpy as np

from .traces.trace import Trace, TraceRequest


def known_tokens(trace: Trace, request: TraceRequest) -> tuple[array[int], array[int]]:
    """The prompt, and what is known of the answer. A prompt longer than its blocks ends with a token of its own."""
    ids = np.frombuffer(request.blocks, np.int32) if request.blocks else np.empty(0, np.int32)
    run = np.repeat(ids, request.sizes if request.sizes is not None else trace.block_tokens)
    prompt, end = run[: request.prompt_tokens], request.prompt_tokens + request.output_tokens
    tokens, answer = array("i"), array("i")
    tokens.frombytes(prompt.tobytes())
    answer.frombytes(run[request.prompt_tokens : end].tobytes())
    tokens.extend([-1] * (request.prompt_tokens - len(tokens)))
    return tokens, answer
