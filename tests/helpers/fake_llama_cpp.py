"""Stands in for the `llama_cpp` package: a model whose next token follows from token and place, and that checks its caller.

Copied to a folder as `llama_cpp.py`, it needs nothing of this repository. Decoding with one cache for all is the slower way.
A line of JSON per `llama_decode` goes to the file that `FAKE_LLAMA_LOG` names.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from types import SimpleNamespace
from typing import Any

VOCABULARY = 97
__version__ = "0.0-fake"


class Context:
    def __init__(self, params: SimpleNamespace) -> None:
        self.params = params
        self.caches: list[list[int]] = [[] for _ in range(params.n_seq_max)]
        self.logits: list[Any] = []
        self.expected: dict[int, int] = {}
        """By sequence: the greedy token after its last one."""

    def room_is_kept(self) -> bool:
        sizes = [len(cache) for cache in self.caches]
        if self.params.kv_unified:
            return sum(sizes) <= self.params.n_ctx
        return max(sizes) <= self.params.n_ctx // self.params.n_seq_max


def llama_backend_init() -> None:
    pass


def llama_model_default_params() -> None:
    pass


def llama_model_load_from_file(path: bytes, params: None) -> str | None:
    return path.decode() if path == b"m.gguf" else None


def llama_model_free(model: str) -> None:
    assert model == "m.gguf"


def llama_model_get_vocab(model: str) -> str:
    return model


def llama_vocab_n_tokens(vocab: str) -> int:
    return VOCABULARY


def llama_context_default_params() -> SimpleNamespace:
    return SimpleNamespace(n_seq_max=1, kv_unified=False)


def llama_init_from_model(model: str, params: SimpleNamespace) -> Context:
    assert params.n_threads == params.n_threads_batch == 2
    return Context(params)


def llama_free(context: Context) -> None:
    context.caches.clear()


def llama_batch_init(n_tokens: int, embd: int, n_seq_max: int) -> SimpleNamespace:
    assert (embd, n_seq_max) == (0, 1)
    rows = range(n_tokens)
    names = ("token", "pos", "n_seq_id", "logits")
    return SimpleNamespace(
        n_tokens=0, seq_id=[[-1] for _ in rows], **{name: [-1 for _ in rows] for name in names}
    )


def llama_batch_free(batch: SimpleNamespace) -> None:
    batch.token.clear()


def llama_get_memory(context: Context) -> Context:
    return context


def llama_memory_seq_rm(memory: Context, seq: int, start: int, end: int) -> bool:
    assert end == -1
    del memory.caches[seq][start:]
    if start:
        memory.expected[seq] = (memory.caches[seq][-1] + start - 1) % VOCABULARY
    else:
        memory.expected.pop(seq, None)
    return True


def llama_state_seq_get_size(context: Context, seq: int) -> int:
    return len(context.caches[seq])


def llama_state_seq_get_data(context: Context, state: Any, size: int, seq: int) -> int:
    state[:size] = context.caches[seq]
    return size


def llama_state_seq_set_data(context: Context, state: Any, size: int, seq: int) -> int:
    assert seq > 0
    context.caches[seq] = list(state[:size])
    return size if context.room_is_kept() else 0


def llama_decode(context: Context, batch: SimpleNamespace) -> int:
    if batch.n_tokens > context.params.n_batch:
        return -1
    context.logits = []
    for row in range(batch.n_tokens):
        token, seq, place = batch.token[row], batch.seq_id[row][0], batch.pos[row]
        assert batch.n_seq_id[row] == 1
        assert place == len(context.caches[seq]), "a hole in a sequence"
        context.caches[seq].append(token)
        context.logits.append(None)
        if place and batch.n_tokens <= context.params.n_seq_max:
            assert token == context.expected[seq], "not the greedy token"
        if batch.logits[row]:
            best = (token + place) % VOCABULARY
            context.expected[seq] = best
            context.logits[-1] = (ctypes.c_float * VOCABULARY)(*(float(i == best) for i in range(VOCABULARY)))
    with open(os.environ["FAKE_LLAMA_LOG"], "a", encoding="utf-8") as log:
        places = [batch.pos[row] for row in range(batch.n_tokens)]
        print(json.dumps([context.params.n_seq_max, context.params.kv_unified, places]), file=log)
    time.sleep(0.004 if context.params.kv_unified else 0.001)
    return 0 if context.room_is_kept() else 1


def llama_get_logits_ith(context: Context, row: int) -> Any:
    return ctypes.cast(context.logits[row], ctypes.POINTER(ctypes.c_float))
