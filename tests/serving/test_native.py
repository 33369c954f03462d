"""The native routes: /generate, tokens, aborting, and what the server says of itself."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.byte_tokenizer import EOS
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import CHAT, Live, events_of, eventually

pytestmark = pytest.mark.asyncio

GENERATE, ABORT = "/generate", "/abort_request"


async def good(live: Live, path: str, body: Any, **options: Any) -> Any:
    status, answer = await live.post(path, body, **options)
    assert status == 200, answer
    return answer


async def stream(live: Live, **body: Any) -> list[dict[str, Any]]:
    async with live.session.post(live.url + GENERATE, json=body | {"stream": True}) as response:
        assert response.status == 200
        return events_of(await response.text())


# --- /generate


async def test_a_text_is_continued(serve):
    live = await serve(say("hello"))
    answer = await good(live, GENERATE, {"text": "Hi", "sampling_params": {"max_new_tokens": 9}})
    meta = answer.pop("meta_info")
    assert answer == {"text": "hello", "output_ids": [*b"hello", EOS]}
    assert meta.pop("e2e_latency") > 0
    assert meta.pop("id").startswith("gen-")
    assert meta == {
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "cached_tokens": 0,
        "cached_tokens_by_tier": {"device": 0, "host": 0, "disk": 0},
    }
    again = await good(live, GENERATE, {"input_ids": list(b"Hi"), "sampling_params": {"max_new_tokens": 3}})
    assert again["text"] == "hel"
    assert again["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert again["meta_info"]["cached_tokens"] == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text": ["a", "b"]}, ["ok", "ok"]),
        ({"text": ["a"]}, ["ok"]),
        ({"input_ids": [[1, 2], [3]]}, ["ok", "ok"]),
        ({"text": "a", "sampling_params": {"n": 3}}, ["ok"] * 3),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, ["ok"] * 4),
    ],
)
async def test_lists_are_answered_by_lists(serve, body, expected):
    live = await serve(say("ok"))
    answers = await good(live, GENERATE, body)
    assert [answer["text"] for answer in answers] == expected
    assert len({answer["meta_info"]["id"] for answer in answers}) == len(expected)
    events = await stream(live, **body)
    last = {event["index"]: event for event in events}
    assert [last[index]["text"] for index in sorted(last)] == expected


async def test_sampling_parameters_reach_the_engine(serve):
    live = await serve(say("one two"))
    sampling = {"temperature": 0.5, "top_k": 7, "min_new_tokens": 2, "stop": "tw", "no_stop_trim": True}
    sampling |= {"sampling_seed": 5, "logit_bias": {"65": 1.5}, "unknown": 1}
    answer = await good(live, GENERATE, {"text": "a", "sampling_params": sampling})
    assert answer["text"] == "one tw"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop"}
    params = live.engine.made[-1].params
    assert (params.temperature, params.top_k, params.min_tokens, params.seed) == (0.5, 7, 2, 5)
    assert params.logit_bias == {65: 1.5}
    assert params.max_tokens == 128


async def test_logprobs_of_output_and_prompt(serve):
    live = await serve(say("xyz"))
    body: dict[str, Any] = {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    meta = (await good(live, GENERATE, body))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.25, 120, None], [-0.25, 121, None]]
    assert meta["input_token_logprobs"] == []
    body |= {"logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = (await good(live, GENERATE, body))["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.98, 98, "b"], [-0.99, 99, "c"]]
    assert meta["input_top_logprobs"] == [None, [[0, 0, "\x00"]], [[0, 0, "\x00"]]]
    assert meta["output_top_logprobs"] == [[[-0.25, 120, "x"]], [[-0.25, 121, "y"]]]
    meta = (await good(live, GENERATE, body | {"logprob_start_len": 2}))["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.99, 99, "c"]]


async def test_a_streams_last_event_is_the_whole_answer(serve):
    live = await serve(say("hello"))
    body = {"text": "abc", "return_logprob": True, "logprob_start_len": 0, "rid": "mine"}
    whole = await good(live, GENERATE, body)
    events = await stream(live, **body)
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(texts) > 2
    for answer in (whole, events[-1]):
        del answer["meta_info"]["e2e_latency"]
        del answer["meta_info"]["cached_tokens"], answer["meta_info"]["cached_tokens_by_tier"]
    assert events[-1] == whole
    assert whole["meta_info"]["id"] == "mine"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [9999]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "sampling_params": {"regex": "[a-"}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "a"}}, "sampling_params.ebnf"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "top_p"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_tokens"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "cache_salt": ""}, "cache_salt"),
        ({"text": "a", "priority": 2**40}, "priority"),
    ],
)
async def test_mistakes_name_the_field(serve, body, param):
    live = await serve(say("x"))
    status, answer = await live.post(GENERATE, body)
    assert (status, answer["error"]["param"]) == (400, param)


# --- /tokenize, /detokenize


async def test_tokens_and_back(serve):
    live = await serve(engine=FakeEngine(add_bos=True))
    told = await good(live, "/tokenize", {"prompt": "a€", "return_token_strs": True})
    assert told == {
        "count": 5,
        "max_model_len": 4096,
        "tokens": [256, *"a€".encode()],
        "token_strs": ["<|bos|>", "a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"],
    }
    assert (await good(live, "/detokenize", {"tokens": told["tokens"]}))["prompt"] == "<|bos|>a€"
    assert (await good(live, "/detokenize", {"tokens": told["tokens"], "skip_special_tokens": True}))[
        "text"
    ] == "a€"
    plain = await good(live, "/tokenize", {"prompt": "a€", "add_special_tokens": False})
    assert (plain["tokens"], plain["token_strs"]) == (list("a€".encode()), None)
    many = await good(live, "/tokenize", {"prompt": ["a", "bc", ""], "add_special_tokens": False})
    assert (many["count"], many["tokens"]) == ([1, 2, 0], [[97], [98, 99], []])
    assert (await good(live, "/detokenize", {"tokens": [[97], [98, 99]]}))["text"] == ["a", "bc"]
    assert (await good(live, "/detokenize", {"tokens": []}))["text"] == ""


async def test_the_tokens_of_a_conversation_are_those_of_a_chat(serve):
    live = await serve(say("x"), engine=FakeEngine(say("x"), add_bos=True))
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    told = await good(live, "/tokenize", {"messages": messages})
    await live.chat(messages=messages)
    made = live.engine.made[-1]
    assert told["tokens"] == list(made.tokens[: made.num_prompt])
    assert told["count"] == made.num_prompt
    shorter = await good(live, "/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert told["tokens"][: shorter["count"]] == shorter["tokens"]
    with_bos = await good(live, "/tokenize", {"messages": messages, "add_special_tokens": True})
    assert with_bos["tokens"] == [256, *told["tokens"]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a" * 200_000}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, None),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        (ABORT, {}, "rid"),
        (ABORT, {"rid": ""}, "rid"),
    ],
)
async def test_mistakes_of_token_routes(serve, path, body, param):
    live = await serve()
    status, answer = await live.post(path, body)
    assert status == 400
    if param is not None:
        assert answer["error"]["param"] == param


# --- /abort_request


async def endless(live: Live, **options: Any) -> asyncio.Task[Any]:
    """A call that would never end, once it runs."""
    before = len(live.engine.made)
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    task = asyncio.create_task(live.post(GENERATE, body | options.pop("body", {}), **options))
    await eventually(lambda: len(live.engine.made) > before and live.engine.stats.running > before)
    return task


async def test_abort_by_rid_ends_that_call_with_what_it_has(serve):
    live = await serve(babble, step_seconds=0.002)
    one, other = [await endless(live, body={"rid": rid}) for rid in ("one", "other")]
    assert await good(live, ABORT, {"rid": "nobody"}) == {"aborted": []}
    told = await good(live, ABORT, {"rid": "one"})
    assert len(told["aborted"]) == 1
    status, answer = await one
    assert status == 200
    assert answer["meta_info"]["finish_reason"] == {"type": "abort"}
    assert len(answer["output_ids"]) == len(answer["text"]) == answer["meta_info"]["completion_tokens"]
    assert not other.done()
    assert (await live.get("/load"))[1]["server_load"] == 1
    await good(live, ABORT, {"abort_all": True})
    assert (await other)[1]["meta_info"]["finish_reason"] == {"type": "abort"}
    await eventually(lambda: live.engine.stats.running == 0)


async def test_any_protocols_call_can_be_aborted_by_its_id(serve):
    live = await serve(babble, step_seconds=0.002)
    response = await live.open_stream(CHAT, max_tokens=4000)
    first = await response.content.readline()
    name = json.loads(first[6:])["id"]
    assert await good(live, ABORT, {"rid": name}) == {"aborted": [name]}
    rest = events_of((first + await response.content.read()).decode())
    assert rest[-1]["choices"][0]["finish_reason"] == "abort"


async def test_a_tenant_aborts_its_own_calls_only(serve, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("alice A\nbob B\nroot\n")
    live = await serve(babble, step_seconds=0.002, api_key_file=str(keys))
    as_ = {name: {"headers": {"Authorization": f"Bearer {name}"}} for name in ("alice", "bob", "root")}
    first = await endless(live, body={"rid": "x"}, **as_["alice"])
    second = await endless(live, body={"rid": "y", "cache_salt": "s"}, **as_["alice"])
    third = await endless(live, body={"rid": "z"}, **as_["root"])
    assert await good(live, ABORT, {"rid": "x"}, **as_["bob"]) == {"aborted": []}
    assert await good(live, ABORT, {"abort_all": True}, **as_["bob"]) == {"aborted": []}
    assert len((await good(live, ABORT, {"abort_all": True}, **as_["alice"]))["aborted"]) == 2
    await first
    await second
    assert not third.done()
    assert len((await good(live, ABORT, {"abort_all": True}, **as_["root"]))["aborted"]) == 1
    await third


# --- what the server says of itself


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_no_secret(serve, tmp_path: Path, path):
    keys = tmp_path / "secret-path"
    keys.write_text("alice tenantsalt\n")
    engine = FakeEngine()
    object.__setattr__(engine.config, "host_disk_cache_dir", "s3://user:hunter2@bucket/cache")
    secrets = {
        "api_key": "sk-main",
        "api_key_file": str(keys),
        "admin_key": "sk-admin",
        "metrics_key": "sk-metrics",
    }
    live = await serve(engine=engine, **secrets)
    status, info = await live.get(path, headers={"Authorization": "Bearer sk-main"})
    assert status == 200
    text = json.dumps(info)
    for secret in (*secrets.values(), "alice", "tenantsalt", "hunter2", "user:"):
        assert secret not in text
    assert info["engine_config"]["host_disk_cache_dir"] == "s3://***@bucket/cache"
    assert info["server_config"]["max_body_size"] == 32 * 2**20
    assert info["model"] == "fake"
    status, info = await live.get(path, headers={"Authorization": "Bearer alice"})
    assert status == 200
    assert "engine_config" not in info
    assert "server_config" not in info


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info(serve, path):
    live = await serve()
    status, info = await live.get(path)
    assert status == 200
    assert (info["model"], info["max_model_len"], info["vocab_size"]) == ("fake", 4096, 260)
    assert info["eos_token_ids"] == [257, 259]
    assert info["has_chat_template"] is True
    assert "mean" in info["embeddings"]
    _, cards = await live.get("/v1/models")
    assert cards["data"][0]["embeddings"] == info["embeddings"]


async def test_tokenizer_info(serve):
    live = await serve()
    status, info = await live.get("/tokenizer_info")
    assert status == 200
    assert "<|im_start|>" in info.pop("chat_template")
    assert info == {"vocab_size": 260, "bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": False}


async def test_load_counts_calls_and_requests(serve):
    live = await serve(babble, step_seconds=0.002, max_running=2)
    idle = {"server_load": 0, "running": 0, "waiting": 0, "kv_usage": 0}
    assert (await live.get("/load"))[1] == idle
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4000, "n": 3}}
    task = asyncio.create_task(live.post(GENERATE, body))
    await eventually(lambda: live.engine.stats.running == 2)
    told = (await live.get("/load"))[1]
    assert told == {"server_load": 1, "running": 2, "waiting": 1, "kv_usage": 2 / 64}
    told = (await live.get("/get_load"))[1]
    assert told == [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 2 * 16}], (
        "as SGLang tells"
    )
    task.cancel()
    await eventually(lambda: live.engine.stats.running == live.engine.stats.waiting == 0)
    await asyncio.sleep(0.02)
    assert (await live.get("/load"))[1] == idle


async def test_health_generate_asks_the_engine(serve):
    live = await serve()
    assert (await live.get("/health_generate"))[0] == 200
    live.thread.kill()
    assert (await live.get("/health_generate"))[0] == 503


async def test_probe_by_another_protocol_is_a_line_in_the_log_and_no_fault(serve, caplog):
    live = await serve()
    caplog.set_level("INFO")
    host, port = live.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    # A router that finds out whether it may speak gRPC.
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    await writer.drain()
    assert (await reader.read(12)).startswith(b"HTTP/1.")
    writer.close()
    await writer.wait_closed()
    assert (await live.get("/health"))[0] == 200
    assert not [record for record in caplog.records if record.exc_info], "a traceback"
    assert [record for record in caplog.records if '"- -" 400' in record.getMessage()]
