"""What good calls get, streamed and not (DEFECTS d1 to d5)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.byte_tokenizer import EOS, IM_START
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import CHAT, COMPLETIONS

pytestmark = pytest.mark.asyncio


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Puts the choices of a stream together; exactly one finish reason each, at the end."""
    choices: dict[int, dict[str, Any]] = {}
    for told in (choice for chunk in chunks for choice in chunk["choices"]):
        empty = {
            "text": "",
            "token_ids": [],
            "prompt_token_ids": None,
            "logprobs": None,
            "finish_reason": None,
        }
        choice = choices.setdefault(told["index"], empty | {"role": None})
        assert choice["finish_reason"] is None, "a choice went on after its finish reason"
        delta = told.get("delta", told)
        choice["role"] = delta.get("role") or choice["role"]
        choice["text"] += delta.get("text") or delta.get("content") or ""
        choice["token_ids"] += told.get("token_ids", [])
        choice["prompt_token_ids"] = told.get("prompt_token_ids") or choice["prompt_token_ids"]
        choice["finish_reason"] = told["finish_reason"]
        for name, values in (told["logprobs"] or {}).items():
            block = choice["logprobs"] = choice["logprobs"] or {}
            block[name] = None if values is None else block.get(name, []) + values
    assert all(choice["finish_reason"] for choice in choices.values())
    return choices


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


async def test_chat_answer_has_openai_shape(serve):
    live = await serve(say("Hello!"))
    answer = await live.chat()
    ChatCompletion.model_validate(answer, strict=True)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = live.engine.made[0].num_prompt
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7}


async def test_prompt_is_the_rendered_template_without_another_bos(serve):
    engine = FakeEngine(say("x"), add_bos=True)
    live = await serve(engine=engine)
    await live.chat(messages=[{"role": "developer", "content": [{"type": "text", "text": "Be"}]}])
    text = engine.tokenizer.decode(
        engine.made[0].tokens[: engine.made[0].num_prompt], skip_special_tokens=False
    )
    assert text == "<|im_start|>system\nBe<|im_end|>\n<|im_start|>assistant\n"
    await live.complete("hi")
    assert list(engine.made[1].tokens[:3]) == [256, *b"hi"]


async def test_completion_answers_every_prompt_form_in_order(serve):
    live = await serve(lambda request, index: [*request.tokens[: request.num_prompt], EOS])
    assert [c["text"] for c in (await live.complete("ab"))["choices"]] == ["ab"]
    assert [c["text"] for c in (await live.complete(["ab", "c"]))["choices"]] == ["ab", "c"]
    assert [c["text"] for c in (await live.complete([97, 98]))["choices"]] == ["ab"]
    answer = await live.complete([[97], [98, 99]], n=2)
    Completion.model_validate(answer, strict=True)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "a"), (2, "bc"), (3, "bc")]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_default_lengths(serve):
    live = await serve(engine=FakeEngine(babble, context_length=100))
    completion = await live.complete("abc")
    assert (completion["choices"][0]["finish_reason"], len(completion["choices"][0]["text"])) == (
        "length",
        16,
    )
    chat = await live.chat()
    assert chat["usage"]["total_tokens"] == 100
    short = await live.chat(max_completion_tokens=3, max_tokens=9)
    assert short["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason"),
    [
        (["ab", "cd", "ef"], ["bcde"], "a", "stop"),
        (["ab", "cd", "xx"], ["bcde"], "abcdxx", "stop"),
        (["abcdef"], ["ef", "cd"], "ab", "stop"),
        (["abcd"], "zz", "abcd", "stop"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stop_strings_never_leak(serve, path, pieces, stop, text, reason):
    live = await serve(say("".join(pieces)))
    chunks = await live.stream(path, stop=stop, max_tokens=20)
    assert joined(chunks)[0]["text"] == text
    assert joined(chunks)[0]["finish_reason"] == reason
    whole = (await (live.chat if path == CHAT else live.complete)(stop=stop, max_tokens=20))["choices"][0]
    assert (text_of(whole), whole["finish_reason"]) == (text, reason)
    kept = await live.complete(stop=stop, max_tokens=20, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"].startswith(text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_split_characters_arrive_whole(serve, path):
    live = await serve(say("잘🙂é"))
    chunks = await live.stream(path, max_tokens=20)
    pieces = [
        c.get("text") or c.get("delta", {}).get("content") for chunk in chunks for c in chunk["choices"]
    ]
    assert [piece for piece in pieces if piece] == ["잘", "🙂", "é"]
    cut = joined(await live.stream(path, max_tokens=5))[0]
    whole = (await (live.chat if path == CHAT else live.complete)(max_tokens=5))["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (text_of(whole), "length") == ("잘\ufffd", "length")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_chunk_only_on_request(serve, path):
    live = await serve(say("abc"))
    plain = await live.stream(path)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)
    *rest, last = await live.stream(path, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in rest)
    whole = await (live.chat if path == CHAT else live.complete)()
    assert last["usage"] == whole["usage"]
    running = await live.stream(path, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in running]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_cached_tokens_in_usage_and_metrics(serve):
    live = await serve(say("abc"))
    first = (await live.chat())["usage"]["prompt_tokens_details"]
    again = (await live.chat(n=3))["usage"]
    assert first["cached_tokens"] == 0
    cached = again["prompt_tokens"] - 1
    assert again["prompt_tokens_details"] == {
        "cached_tokens": cached,
        "cached_tokens_by_tier": {"device": cached, "host": 0, "disk": 0},
    }
    samples = await live.metrics()
    assert samples["tierax_cache_hit_tokens_total"] == 3 * cached
    assert samples["tierax_cache_query_tokens_total"] == 4 * again["prompt_tokens"]
    rate = 3 * cached / (4 * again["prompt_tokens"])
    assert samples["tierax_cache_hit_rate"] == pytest.approx(rate)


async def test_salts_share_nothing(serve):
    live = await serve(say("abc"))

    async def cached(**fields: Any) -> int:
        return (await live.chat(**fields))["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [await cached(cache_salt=salt) > 0 for salt in ("s1", "s1", "s2", None, "s1")] == [
        *(False, True),
        *(False, False),
        True,
    ]
    assert live.engine.made[0].namespace == b"salt:\x00\x00\x00\x02s1"


async def test_choices_differ_repeat_and_end_on_their_own(serve):
    def script(request, index):
        return [*b"ab", EOS] if index == 0 else babble(request, index)

    live = await serve(script)
    fields: dict[str, Any] = {"n": 3, "seed": 7, "max_tokens": 12}
    answer = await live.complete("x", **fields)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length", "length"]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in (await live.complete("x", **fields))["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == 1
    streamed = joined(await live.stream(COMPLETIONS, prompt="x", **fields))
    assert [streamed[i]["text"] for i in range(3)] == texts


async def test_chat_logprobs(serve):
    live = await serve(say("héé🙂"))
    answer = await live.chat(logprobs=True, top_logprobs=3, max_tokens=20)
    ChatCompletion.model_validate(answer, strict=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "héé🙂"
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        chosen = {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert entry["top_logprobs"][0] == chosen
    bare = await live.chat(logprobs=True)
    assert all(entry["top_logprobs"] == [] for entry in bare["choices"][0]["logprobs"]["content"])
    assert (await live.chat(logprobs=False))["choices"][0]["logprobs"] is None


async def test_completion_logprobs(serve):
    live = await serve(say("a🙂b"))
    answer = await live.complete(logprobs=2)
    Completion.model_validate(answer, strict=True)
    block = answer["choices"][0]["logprobs"]
    parts = [f"bytes:\\x{byte:02x}" for byte in "🙂".encode()]
    assert block["tokens"] == ["a", *parts, "b"]
    assert block["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert block["token_logprobs"] == [-0.25] * 6
    assert list(block["top_logprobs"][0]) == ["a", "b"]
    assert all(len(top) == 2 for top in block["top_logprobs"])
    only = (await live.complete(logprobs=0))["choices"][0]["logprobs"]
    assert only["top_logprobs"][0] == {"a": -0.25}


async def test_no_infinity_in_json(serve, monkeypatch):
    import helpers.fake_engine as fake

    real = fake.TokenLogprob
    monkeypatch.setattr(
        fake, "TokenLogprob", lambda token, _, top: real(token, -math.inf, ((token, -math.inf),))
    )
    live = await serve(say("ab"))
    answer = await live.chat(logprobs=True, top_logprobs=1)
    assert [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] == [-9999.0, -9999.0]


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2}, {"echo": True}, {"stop": ["z"]}, {"skip_special_tokens": False}]
)
async def test_streamed_completion_equals_whole(serve, fields):
    def script(request, index):
        return [*"aé🙂z"[index:].encode(), IM_START, *b"bc", EOS]

    live = await serve(script)
    if "echo" not in fields:
        fields = {**fields, "logprobs": 2}
    fields = {**fields, "return_token_ids": True, "ignore_eos": True, "max_tokens": 9}
    whole = (await live.complete("hé", **fields))["choices"]
    streamed = joined(await live.stream(COMPLETIONS, prompt="hé", **fields))
    for choice in whole:
        parts = streamed[choice["index"]]
        assert {name: parts[name] for name in choice if name != "index"} == {
            name: value for name, value in choice.items() if name != "index"
        }


async def test_streamed_chat_equals_whole(serve):
    live = await serve(say("aé🙂 bc"))
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True}
    whole = await live.chat(**fields)
    chunks = await live.stream(CHAT, **fields)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    streamed = joined(chunks)
    for choice in whole["choices"]:
        parts = streamed[choice["index"]]
        assert parts["role"] == "assistant"
        assert parts["text"] == choice["message"]["content"]
        assert parts["token_ids"] == choice["token_ids"]
        assert parts["logprobs"] == choice["logprobs"]
        assert parts["finish_reason"] == choice["finish_reason"]
        assert parts["prompt_token_ids"] == whole["prompt_token_ids"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_echo(serve):
    live = await serve(say(" there"))
    assert (await live.complete("Hi", echo=True))["choices"][0]["text"] == "Hi there"
    only = await live.complete(["Hi", "Yo"], echo=True, max_tokens=0, n=2)
    assert [c["text"] for c in only["choices"]] == ["Hi", "Hi", "Yo", "Yo"]
    assert {c["finish_reason"] for c in only["choices"]} == {"length"}
    assert (only["usage"]["prompt_tokens"], only["usage"]["completion_tokens"]) == (4, 0)
    chunks = await live.stream(COMPLETIONS, prompt=[72, 105], echo=True, max_tokens=0)
    assert joined(chunks)[0]["text"] == "Hi"


async def test_continuing_the_last_message(serve):
    live = await serve(say("!"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well"}]
    await live.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    request = live.engine.made[0]
    text = live.engine.tokenizer.decode(request.tokens[: request.num_prompt], skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nWell")


async def test_nulls_and_unknown_fields_are_ignored(serve, caplog):
    live = await serve(say("abc"))
    with caplog.at_level("DEBUG", logger="tierax.serving"):
        body = {
            "temperature": None,
            "stop": None,
            "n": None,
            "colour": "red",
            "extra": {"secret": 1},
            "tools": [],
        }
        answer = await live.chat(**body, response_format={"type": "text"}, tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == "abc"
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert lines == ["fields ignored: colour, extra"]


async def test_model_list(serve):
    live = await serve()
    status, answer = await live.get("/v1/models")
    assert (status, [model["id"] for model in answer["data"]]) == (200, ["fake"])
    assert answer["data"][0]["max_model_len"] == 4096
    assert (await live.get("/v1/models/fake"))[1] == answer["data"][0]
    status, answer = await live.get("/v1/models/other/name")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_json_is_strict(serve):
    live = await serve(say('"\\\n\u2028'))
    async with live.session.post(
        live.url + CHAT, json={"messages": [{"role": "user", "content": "x"}]}
    ) as response:
        assert response.content_type == "application/json"
        assert json.loads(await response.read())["choices"][0]["message"]["content"] == '"\\\n\u2028'
