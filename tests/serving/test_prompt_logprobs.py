"""Log-probs of prompts over HTTP: OpenAI's legacy echo, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.byte_tokenizer import BOS
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import CHAT, COMPLETIONS

pytestmark = pytest.mark.asyncio


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed completion of one choice, put together."""
    total: dict[str, Any] = {"text": "", "logprobs": None, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            total["text"] += choice["text"]
            total["finish_reason"] = choice["finish_reason"] or total["finish_reason"]
            if block := choice["logprobs"]:
                before = total["logprobs"] or {name: [] for name in block}
                total["logprobs"] = {name: before[name] + block[name] for name in block}
            if "prompt_logprobs" in choice:
                total["prompt_logprobs"] = choice["prompt_logprobs"]
    return total


async def test_echo_with_logprobs_scores_the_prompt(serve):
    live = await serve(say("xyz"))
    answer = await live.complete("ab€", echo=True, logprobs=2, max_tokens=2, temperature=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "ab€xy"
    block = choice["logprobs"]
    assert block["tokens"] == ["a", "b", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "x", "y"]
    assert block["token_logprobs"] == [None, -0.98, -2.26, -1.30, -1.72, -0.25, -0.25]
    assert block["top_logprobs"][0] is None
    assert block["top_logprobs"][1] == {"\x00": 0, "\x01": -0.1, "b": -0.98}
    # The character counts once its last byte is there.
    assert block["text_offset"] == [0, 1, 2, 2, 2, 3, 4]


async def test_echo_of_token_ids_and_of_an_added_bos(serve):
    live = await serve(say("x"), engine=FakeEngine(say("x"), add_bos=True))
    answer = await live.complete([[104, 105], [106]], echo=True, logprobs=1, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == ["hi", "j"]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[None, -1.05], [None]]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 0
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    (choice,) = (await live.complete("h<|im_end|>i", echo=True, logprobs=0, max_tokens=0))["choices"]
    assert choice["logprobs"]["tokens"] == ["<|bos|>", "h", "<|im_end|>", "i"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 11]
    assert live.engine.made[-1].tokens[0] == BOS


async def test_the_end_token_has_its_log_prob_for_those_who_score(serve):
    """Scorers leave out the last entry, as that of the one generated token: it must be there."""
    live = await serve(say(""), engine=None)
    (choice,) = (await live.complete("abc", echo=True, logprobs=1, max_tokens=1))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == "abc"
    assert len(choice["logprobs"]["token_logprobs"]) == 4


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 0}, {"echo": False, "prompt_logprobs": 1}, {"n": 1}])
async def test_streamed_is_whole(serve, fields):
    live = await serve(say("xyz"))
    body = {"prompt": "ab€", "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0} | fields
    (whole,) = (await live.complete(**body))["choices"]
    streamed = joined(await live.stream(COMPLETIONS, **body))
    assert streamed == {key: whole[key] for key in streamed}
    assert ("prompt_logprobs" in whole) == ("prompt_logprobs" in fields)


async def test_prompt_logprobs_as_vllm_tells_them(serve):
    live = await serve(say("ok"))
    (choice,) = (await live.complete("ab", prompt_logprobs=2))["choices"]
    assert choice["text"] == "ok"
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            "0": {"logprob": 0, "rank": 1, "decoded_token": "\x00"},
            "1": {"logprob": -0.1, "rank": 2, "decoded_token": "\x01"},
            "98": {"logprob": -0.98, "rank": 3, "decoded_token": "b"},
        },
    ]
    (only_own,) = (await live.complete("ab", prompt_logprobs=0, max_tokens=0))["choices"]
    assert only_own["prompt_logprobs"] == [None, {"98": {"logprob": -0.98, "rank": 3, "decoded_token": "b"}}]
    assert only_own["text"] == ""


async def test_prompt_logprobs_of_a_chat(serve):
    live = await serve(say("ok"))
    answer = await live.chat(prompt_logprobs=1)
    prompt = live.engine.made[-1].num_prompt
    assert len(answer["prompt_logprobs"]) == prompt
    chunks = await live.stream(CHAT, prompt_logprobs=1)
    told = [c for chunk in chunks for c in chunk["choices"] if "prompt_logprobs" in c]
    assert [c["prompt_logprobs"] for c in told] == [answer["prompt_logprobs"]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21, "echo": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1.5}, "prompt_logprobs"),
    ],
)
async def test_mistakes_name_the_field(serve, path, body, param):
    live = await serve(say("x"))
    status, answer = await live.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_truncation_keeps_the_last_tokens(serve):
    live = await serve(say("ok"), engine=FakeEngine(say("ok"), context_length=20))
    long = "0123456789" * 5
    status, _ = await live.post(COMPLETIONS, {"prompt": long})
    assert status == 400
    (choice,) = (await live.complete(long, truncate_prompt_tokens=4, echo=True))["choices"]
    assert choice["text"] == "6789ok"
    await live.complete(list(long.encode()), truncate_prompt_tokens=3)
    assert bytes(live.engine.made[-1].tokens.tolist()[:3]) == b"789"
    await live.complete(long, truncate_prompt_tokens=-1, max_tokens=1)
    assert live.engine.made[-1].num_prompt == 19
    await live.chat(truncate_prompt_tokens=5, max_tokens=2)
    assert live.engine.made[-1].num_prompt == 5


async def test_best_of_takes_the_likeliest(serve):
    """The fake engine's log-probs are all the same, so those of one choice are changed on their way."""
    live = await serve(lambda request, index: [*b"abcd"[index : index + 1] * 2])
    generation_values = {"a": -3.0, "b": -1.0, "c": -2.0, "d": -0.5}
    thread = live.thread
    tell = thread._tell

    def retold(delta):
        delta.logprobs = [
            type(entry)(entry.token_id, generation_values[chr(entry.token_id)], entry.top)
            for entry in delta.logprobs
        ]
        tell(delta)

    thread._tell = retold
    answer = await live.complete(["x", "y"], n=2, best_of=4, max_tokens=2, return_token_ids=True)
    told = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert told == [(0, "dd"), (1, "bb"), (2, "dd"), (3, "bb")]
    assert [bytes(choice["prompt_token_ids"]) for choice in answer["choices"]] == [b"x", b"x", b"y", b"y"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 16
