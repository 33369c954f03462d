"""`/v1/embeddings` over HTTP: shapes, limits and mistakes on the fake engine, whose vectors count bytes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientTimeout
from openai import AsyncOpenAI, BadRequestError

from helpers.byte_tokenizer import BOS, VOCAB_SIZE
from helpers.fake_engine import FakeEngine, babble
from helpers.live_server import COMPLETIONS, Live, eventually

pytestmark = pytest.mark.asyncio

PATH = "/v1/embeddings"


def vector(text: str) -> np.ndarray:
    """How often each byte occurs, scaled to length 1: what the fake engine makes of a text."""
    counts = np.bincount(list(text.encode()), minlength=VOCAB_SIZE)
    return counts / np.linalg.norm(counts)


async def embed(live: Live, value: Any, **fields: Any) -> dict[str, Any]:
    status, answer = await live.post(PATH, {"input": value} | fields)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize(
    "value", ["abb", ["abb", "xyz", "abb"], list(b"abb"), [list(b"abb"), list(b"xyz")]], ids=str
)
async def test_every_form_of_input(serve, value):
    live = await serve()
    answer = await embed(live, value)
    texts = {0: "abb", 1: "xyz", 2: "abb"}
    count = len(value) if isinstance(value, list) and not isinstance(value[0], int) else 1
    assert [entry["index"] for entry in answer["data"]] == list(range(count))
    for entry in answer["data"]:
        assert entry["embedding"] == pytest.approx(vector(texts[entry["index"]]), abs=1e-6)
    assert answer["usage"] == {"prompt_tokens": 3 * count, "total_tokens": 3 * count}
    assert (answer["object"], answer["model"]) == ("list", "fake")


async def test_the_two_encodings_are_the_same_floats(serve):
    live = await serve()
    (as_list,) = (await embed(live, "hello"))["data"]
    (as_text,) = (await embed(live, "hello", encoding_format="base64", model="fake"))["data"]
    decoded = np.frombuffer(base64.b64decode(as_text["embedding"]), "<f4")
    assert decoded.tolist() == as_list["embedding"]
    assert np.linalg.norm(decoded) == pytest.approx(1, abs=1e-6)


async def test_the_official_client(serve):
    live = await serve()
    async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.embeddings.create(model="fake", input=["ab", "c"])
        floats = await client.embeddings.create(model="fake", input="ab", encoding_format="float")
        same = await client.embeddings.create(model="fake", input="ab", dimensions=VOCAB_SIZE)
        with pytest.raises(BadRequestError, match="260 numbers"):
            await client.embeddings.create(model="fake", input="ab", dimensions=64)
    assert whole.data[0].embedding == pytest.approx(vector("ab"), abs=1e-6)
    assert whole.data[1].index == 1
    assert floats.data[0].embedding == same.data[0].embedding == whole.data[0].embedding
    assert whole.usage.total_tokens == 3


async def test_a_bos_and_truncation(serve):
    live = await serve(engine=FakeEngine(add_bos=True, context_length=20))
    await embed(live, "abc")
    assert live.engine.made[-1].tokens.tolist() == [BOS, *b"abc"]
    await embed(live, "abc", add_special_tokens=False)
    assert live.engine.made[-1].tokens.tolist() == [*b"abc"]
    await embed(live, "x" * 50 + "abc", truncate_prompt_tokens=3)
    assert live.engine.made[-1].tokens.tolist() == [*b"abc"]
    # An embedding needs no room for an answer.
    await embed(live, list(range(20)))


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": ["a", 5]}, "input", "kinds"),
        ({"input": [999]}, "input", "vocabulary"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": "a" * 5000}, "input", "4096"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions", "260"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "empty"),
        ({"input": "a", "priority": 2**31}, "priority", "32 bits"),
        ({"input": "a", "model": "other"}, "model", "no model"),
    ],
    ids=str,
)
async def test_mistakes_name_the_field(serve, body, param, word):
    live = await serve()
    status, answer = await live.post(PATH, body)
    assert status == (404 if param == "model" else 400)
    assert answer["error"]["param"] == param
    assert word in answer["error"]["message"]


async def test_tenants_and_aborts(serve):
    """An embedding's KV is its tenant's; a caller that goes takes its work along."""
    live = await serve(babble, step_seconds=0.005, max_running=1)
    await embed(live, "abc", cache_salt="s")
    assert live.engine.made[-1].namespace == b"salt:\x00\x00\x00\x01s"
    busy = await live.open_stream(COMPLETIONS, max_tokens=4000)
    with pytest.raises(TimeoutError):
        await live.session.post(live.url + PATH, json={"input": ["a"] * 5}, timeout=ClientTimeout(total=0.2))
    await eventually(lambda: live.engine.stats.waiting == 0)
    busy.close()
