"""Every client's mistake is a 4xx that names its field, and the next request works (DEFECTS d6, g3, g5, h6)."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import zlib
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from helpers.byte_tokenizer import VOCAB_SIZE
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live
from tierax.serving.http.errors import CLIENT_LEFT, error_middleware
from tierax.serving.openai.bodies import decode_completion

pytestmark = pytest.mark.asyncio

NAN = b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
DEEP_LIST = b'{"x": ' + b"[" * 100_000
DEEP_OBJECT = b'{"x": ' + b'{"a":' * 100_000
SURROGATE = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'


async def refused(live: Live, path: str, body: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    got, answer = await live.post(path, body)
    assert got == status, answer
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert (await live.complete("ok"))["choices"][0]["text"] == "fine"
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [5]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"x": 5}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 5}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a", "ebnf": "b"}, "ebnf"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
async def test_bad_chat(serve, fields, param):
    live = await serve(say("fine"))
    await refused(live, CHAT, {"messages": MESSAGES} | fields, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["ok", ""]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 500, "n": 3}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "prompt": [VOCAB_SIZE]}, "prompt"),
        ({"max_tokens": 2, "echo": True, "prompt": [2**32]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_bad_completion(serve, fields, param):
    live = await serve(say("fine"))
    await refused(live, COMPLETIONS, {"prompt": "x"} | fields, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b'"x"', b"null", NAN, SURROGATE, b"9" * 5000, DEEP_LIST, DEEP_OBJECT],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bad_json(serve, path, body):
    live = await serve(say("fine"))
    await refused(live, path, body, None)


async def test_deep_but_parsable_json(serve):
    live = await serve(say("fine"))
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    await refused(live, COMPLETIONS, {"prompt": deep}, "prompt[0][0]")
    status, _ = await live.post(CHAT, {"messages": [{"role": "user", "content": "x", "extra": deep}]})
    assert status in (200, 400)


async def test_missing_fields_are_named(serve):
    live = await serve(say("fine"))
    assert "missing" in (await refused(live, CHAT, {}, "messages"))["message"]
    assert "missing" in (await refused(live, COMPLETIONS, {}, "prompt"))["message"]


async def test_unknown_model(serve):
    live = await serve(say("fine"))
    error = await refused(live, CHAT, {"messages": MESSAGES, "model": "gpt-9"}, "model", 404)
    assert error["code"] == "model_not_found"


async def test_unknown_route_and_method(serve):
    live = await serve(say("fine"))
    status, answer = await live.post("/v1/nope", {})
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer = await live.get(CHAT)
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    async with live.session.get(live.url + CHAT) as response:
        assert response.headers["Allow"] == "POST"


async def test_too_long_prompt_says_the_numbers(serve):
    live = await serve(engine=FakeEngine(say("fine"), context_length=100))
    error = await refused(live, COMPLETIONS, {"prompt": "x" * 100}, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "100" in error["message"]
    messages = [{"role": "user", "content": "x" * 100}]
    await refused(live, CHAT, {"messages": messages}, "messages")
    await refused(live, COMPLETIONS, {"prompt": [5] * 100}, "prompt")


async def test_a_hopeless_text_is_not_even_tokenized(serve, monkeypatch):
    engine = FakeEngine(say("fine"), context_length=100)
    encode, longest = engine.tokenizer.encode, len("<|im_start|>")
    lengths: list[int] = []
    monkeypatch.setattr(
        engine.tokenizer,
        "encode",
        lambda text, add_bos: (lengths.append(len(text)), encode(text, add_bos=add_bos))[1],
    )
    live = await serve(engine=engine)
    text = "x" * (200 * longest)
    error = await refused(live, COMPLETIONS, {"prompt": text}, "prompt")
    assert error["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": text}]
    await refused(live, CHAT, {"messages": messages}, "messages")
    await refused(live, COMPLETIONS, {"prompt": [5] * 1000}, "prompt")
    assert max(lengths) < 10


async def test_template_that_refuses(serve):
    engine = FakeEngine(say("fine"))
    from tierax.engine.chat_template import ChatTemplate

    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
    engine.chat_template = ChatTemplate(source, "", "")
    live = await serve(engine=engine)
    body = {"messages": [{"role": "system", "content": "x"}]}
    assert "no system here" in (await refused(live, CHAT, body, "messages"))["message"]


async def test_model_without_template(serve):
    live = await serve(engine=FakeEngine(say("fine"), template=False))
    assert "/v1/completions" in (await refused(live, CHAT, {"messages": MESSAGES}, "messages"))["message"]


async def test_body_limit(serve):
    live = await serve(engine=FakeEngine(say("fine"), context_length=2_000_000), max_body_size=2_000_000)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 1_500_000}], "max_tokens": 4}).encode()
    status, answer = await live.post(CHAT, body)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] > 1_500_000
    exact = b'{"prompt": "ok"' + b" " * (2_000_000 - 16) + b"}"
    assert len(exact) == 2_000_000
    assert (await live.post(COMPLETIONS, exact))[0] == 200
    error = await refused(live, COMPLETIONS, exact + b" ", None, 413)
    assert error["code"] == "request_too_large"


async def test_body_limit_holds_for_chunked_bodies(serve):
    live = await serve(say("fine"), max_body_size=100_000)

    async def pieces():
        for _ in range(30):
            yield b" " * 10_000

    async with live.session.post(live.url + CHAT, data=pieces()) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"


async def test_gzip_bodies(serve):
    live = await serve(say("fine"), max_body_size=100_000)
    headers = {"Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps({"prompt": "ok"}).encode())
    status, _ = await live.post(COMPLETIONS, body, headers=headers)
    assert status == 200
    bomb = gzip.compress(bytes(200_000_000), 9)
    before = time.monotonic()
    status, answer = await live.post(COMPLETIONS, bomb, headers=headers)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert time.monotonic() - before < 3
    for damaged in (b"no gzip at all", body[:-9], b""):
        status, answer = await live.post(COMPLETIONS, damaged, headers=headers)
        assert (status, answer["error"]["code"]) == (400, "invalid_encoding")
    assert (await live.post(COMPLETIONS, b"{}", headers={"Content-Encoding": "br"}))[0] == 415
    deflated = zlib.compress(json.dumps({"prompt": "ok"}).encode())
    assert (await live.post(COMPLETIONS, deflated, headers={"Content-Encoding": "deflate"}))[0] == 200
    assert (await live.complete("ok"))["choices"][0]["text"] == "fine"


async def test_slow_text_work_does_not_hold_up_others(serve, monkeypatch):
    engine = FakeEngine(say("fine"))
    encode = engine.tokenizer.encode

    def slowly(text, *, add_bos):
        if "slow" in text:
            time.sleep(0.4)
        return encode(text, add_bos=add_bos)

    monkeypatch.setattr(engine.tokenizer, "encode", slowly)
    live = await serve(engine=engine)
    slow = asyncio.create_task(live.complete("slow"))
    await asyncio.sleep(0.05)
    before = time.monotonic()
    await live.complete("ok")
    assert time.monotonic() - before < 0.2
    assert not slow.done()
    await slow


async def test_big_bodies_are_decoded_off_the_event_loop(serve, monkeypatch):
    threads: list[str] = []

    def noting(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return decode_completion(body)

    monkeypatch.setattr("tierax.serving.openai.completions.decode_completion", noting)
    live = await serve(say("fine"))
    await live.complete("ok")
    await live.complete("ok", unknown="x" * 2**16)
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("text")


async def test_a_hopeless_conversation_is_not_even_rendered(serve, monkeypatch):
    engine = FakeEngine(say("fine"), context_length=100)
    live = await serve(engine=engine)

    def render(*_: Any, **__: Any) -> str:
        raise AssertionError("was rendered")

    monkeypatch.setattr(engine.chat_template, "render", render)
    status, answer = await live.post(CHAT, {"messages": MESSAGES * 101})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "messages"


async def test_a_million_biases_are_counted_before_they_are_read(serve):
    live = await serve(say("fine"))
    error = await refused(
        live, CHAT, {"messages": MESSAGES, "logit_bias": {str(-i): 1 for i in range(1000)}}, "logit_bias"
    )
    assert "1000 entries" in error["message"]


async def test_unexpected_fault_leaks_nothing(serve, caplog):
    engine = FakeEngine(say("fine"))
    real = engine.make_requests

    def broken(*args, **kwargs):
        raise KeyError("secret path")

    engine.make_requests = broken
    live = await serve(engine=engine)
    status, answer = await live.post(CHAT, {"messages": MESSAGES})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in json.dumps(answer)
    assert "secret path" in caplog.text
    engine.make_requests = real
    await live.chat()


async def test_a_client_that_left_is_no_error_of_the_server(caplog):
    async def handler(_: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    response = await error_middleware(make_mocked_request("POST", CHAT), handler)
    assert response.status == CLIENT_LEFT
    assert not caplog.records
