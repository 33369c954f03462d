"""The store's bounds, and what continuing a response is worth on a real model."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from helpers.live_server import Live
from helpers.tiny_text_model import write_tiny_text_model
from tierax.engine.config import EngineConfig
from tierax.engine.engine import Engine
from tierax.serving.http.errors import ApiError
from tierax.serving.responses.store import Continuation, ResponseStore, Stored

PAGE = 4


def stored(name: str, tokens: int = 1, tenant: bytes = b"", body_bytes: int = 0) -> Stored:
    ids = array("i", [0] * tokens)
    return Stored(tenant, {"id": name}, [], Continuation([], [], b"", ids, None), body_bytes)


def held(store: ResponseStore, names: str) -> str:
    """Which of these are there, without using any."""
    return "".join(name for name in names if name in store)


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(max_responses=3, max_tokens=100)
    for name in "abc":
        store.put(stored(name))
    store.get("a", b"")
    store.put(stored("d"))
    assert held(store, "abcd") == "acd"
    store.delete("c", b"")
    assert (held(store, "abcd"), store.tokens) == ("ad", 2)


def test_tokens_are_bounded_too() -> None:
    store = ResponseStore(max_responses=100, max_tokens=10)
    store.put(stored("a", 4))
    store.put(stored("b", 4))
    store.put(stored("c", 6))
    assert (held(store, "abc"), store.tokens) == ("bc", 10)
    store.put(stored("d", 11))
    assert (held(store, "bcd"), store.tokens) == ("bc", 10)


def test_bodies_are_bounded_too() -> None:
    store = ResponseStore(max_bytes=100)
    for name in "abc":
        store.put(stored(name, body_bytes=50))
    assert held(store, "abc") == "bc"
    store.delete("b", b"")
    store.put(stored("d", body_bytes=50))
    assert held(store, "abcd") == "cd"


def test_only_its_tenant_gets_a_response() -> None:
    store = ResponseStore()
    store.put(stored("a", tenant=b"red"))
    for ask in (store.get, store.delete):
        with pytest.raises(ApiError) as refused:
            ask("a", b"blue")
        assert refused.value.status == 404
    assert store.get("a", b"red").tenant == b"red"


@pytest.mark.asyncio
async def test_a_continued_response_is_read_from_the_cache(serve, tmp_path: Path) -> None:
    """A random model writes bytes that are no text: told as text and sent back, they are other tokens."""
    write_tiny_text_model(tmp_path / "model")
    engine = Engine(
        EngineConfig(
            model_path=str(tmp_path / "model"),
            page_size=PAGE,
            max_num_seqs=1,
            max_num_batched_tokens=8,
            context_length=256,
            device_cache_size="8MiB",
            skip_warmup=True,
        )
    )
    live: Live = await serve(engine=engine)
    common: dict[str, Any] = {"max_output_tokens": 24, "temperature": 1, "ignore_eos": True}

    async def ask(given: Any, **fields: Any) -> dict[str, Any]:
        status, answer = await live.post("/v1/responses", {"input": given} | common | fields)
        assert status == 200, answer
        return answer

    first = await ask("Hi", seed=1)
    text = first["output"][0]["content"][0]["text"]
    assert "\ufffd" in text
    second = await ask("More", seed=2, previous_response_id=first["id"])
    third = await ask("?", seed=3, previous_response_id=second["id"])
    for before, after in ((first, second), (second, third)):
        read = before["usage"]["total_tokens"]
        # The KV of the last token was never computed.
        assert after["usage"]["input_tokens_details"]["cached_tokens"] == (read - 1) // PAGE * PAGE
        assert after["usage"]["input_tokens_details"]["cached_tokens_by_tier"]["device"] > 0
    as_text = await ask(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "More"},
        ]
    )
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert as_text["usage"]["input_tokens_details"]["cached_tokens"] < cached
