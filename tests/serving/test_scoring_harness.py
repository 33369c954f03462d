"""What evaluation harnesses send, against a real tiny model: their scores are those of one plain forward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web

from helpers.plain_forward import plain_hidden, plain_logprobs
from helpers.tiny_text_model import write_tiny_text_model
from tierax.engine.config import EngineConfig
from tierax.engine.engine import Engine
from tierax.engine.thread import EngineThread
from tierax.models.source import resolve_model
from tierax.models.weights.loader import load_params
from tierax.serving.app import make_app
from tierax.serving.config import ServerConfig
from tierax.serving.server import bind, make_runner

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTIONS = [
    ("Question: two and two?\nAnswer:", [" four", " five and a bit", " 4"]),
    ("Question: of what is a bow made, as a rule?\nAnswer:", [" wood", " bread"]),
    ("Q?\n", ["yes", "no"]),
]


class Rig:
    """A server over a real engine, and the plain forward of its model."""

    def __init__(self, url: str, session: ClientSession, directory: Path) -> None:
        self.url, self.session = url, session
        source = resolve_model(str(directory))
        self.config, self.params = source.config, load_params(source, source.config, stacked=True)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    def truth(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-likelihood of a continuation, and whether greedy decoding would give it."""
        first, ids = len(context.encode()), list((context + continuation).encode())
        rows = plain_logprobs(self.params, self.config, ids, range(first - 1, len(ids) - 1))
        greedy = all(row.argmax() == token for row, token in zip(rows, ids[first:], strict=True))
        return sum(float(row[token]) for row, token in zip(rows, ids[first:], strict=True)), greedy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_text_model(directory)
    config = EngineConfig(
        model_path=str(directory),
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=4,
        context_length=256,
        device_cache_size="8MiB",
        skip_warmup=True,
    )
    thread = EngineThread(await asyncio.to_thread(Engine, config))
    thread.start()
    await asyncio.to_thread(thread.wait_ready)
    app = make_app(thread, ServerConfig(data_dir=str(tmp_path_factory.mktemp("data"))))
    runner = make_runner(app)
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    await web.SockSite(runner, listener).start()
    async with ClientSession() as session:
        yield Rig(f"http://127.0.0.1:{listener.getsockname()[1]}", session, directory)
    await runner.cleanup()
    await asyncio.to_thread(thread.close, 1.0)


def likelihood(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """How the harness reads a choice: without the context's entries, and without that of the generated token."""
    values = choice["logprobs"]["token_logprobs"][context:-1]
    top = choice["logprobs"]["top_logprobs"][context:-1]
    greedy = all(value == max(ones.values()) for value, ones in zip(values, top, strict=True))
    return sum(values), greedy


@pytest.mark.parametrize("as_ids", [True, False])
async def test_batches_of_token_ids_or_texts(rig: Rig, as_ids: bool) -> None:
    pairs = [(context, choice) for context, choices in QUESTIONS for choice in choices]
    for again in range(2):
        texts = [context + choice for context, choice in pairs]
        prompts = [list(text.encode()) for text in texts] if as_ids else texts
        body = {"model": None, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        answer = await rig.post("/v1/completions", body | {"prompt": prompts})
        assert len(answer["choices"]) == len(pairs)
        for choice, (context, continuation) in zip(answer["choices"], pairs, strict=True):
            value, greedy = likelihood(choice, len(context))
            expected, expected_greedy = rig.truth(context, continuation)
            assert value == pytest.approx(expected, abs=1e-3), (again, context, continuation)
            assert greedy == expected_greedy
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_the_greedy_continuation_is_known_as_such(rig: Rig) -> None:
    prompt = list(QUESTIONS[0][0].encode())
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (choice,) = (await rig.post("/v1/completions", body))["choices"]
    scored = {"prompt": prompt + choice["token_ids"], "max_tokens": 1, "logprobs": 1, "echo": True}
    (told,) = (await rig.post("/v1/completions", scored))["choices"]
    assert likelihood(told, len(prompt))[1]


async def test_generation_in_both_forms(rig: Rig) -> None:
    prompts = [list(context.encode()) for context, _ in QUESTIONS]
    body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "stop": ["\n", "<|eos|>"], "seed": 1234}
    answer = await rig.post("/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all("\n" not in choice["text"] for choice in answer["choices"])
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0, "seed": 1}
    answer = await rig.post("/v1/chat/completions", chat | {"stop": ["\n"]})
    assert isinstance(answer["choices"][0]["message"]["content"], str)


async def test_the_servers_tokenizer_does_for_the_harness(rig: Rig) -> None:
    async with rig.session.get(rig.url + "/tokenizer_info") as response:
        info = await response.json()
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    (end,) = (await rig.post("/tokenize", body))["tokens"]
    assert (await rig.post("/detokenize", {"tokens": [end]}))["prompt"] == info["eos_token"]


async def test_an_embedding_is_the_mean_of_the_hidden_states(rig: Rig) -> None:
    (entry,) = (await rig.post("/v1/embeddings", {"input": "hello there"}))["data"]
    mean = plain_hidden(rig.params, rig.config, list(b"hello there")).mean(0)
    assert entry["embedding"] == pytest.approx(mean / math.sqrt(float(mean @ mean)), abs=1e-5)


async def test_native_scores_are_the_same(rig: Rig) -> None:
    context, choices = QUESTIONS[1]
    body = {"text": context + choices[0], "return_logprob": True, "logprob_start_len": len(context)}
    answer = await rig.post("/generate", body | {"sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    told = sum(value for value, _, _ in answer["meta_info"]["input_token_logprobs"])
    assert told == pytest.approx(rig.truth(context, choices[0])[0], abs=1e-3)
