"""Batches: every line answered once, by the code that answers over HTTP; files, lists and mistakes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from helpers.batch_client import create, finished, jsonl, line, results, upload
from helpers.fake_engine import say
from helpers.live_server import CHAT, COMPLETIONS
from tierax.serving.batch import runner as batch_runner

pytestmark = pytest.mark.asyncio


def many(count: int, **body: Any) -> bytes:
    return jsonl(line(f"q{i}", **body) for i in range(count))


async def test_the_openai_client_runs_a_batch(serve):
    live = await serve(say("Hello"), api_key="right")
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="right", max_retries=0) as client:
        content = jsonl(line(f"q{i}", CHAT, model="fake") for i in range(20))
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "test"}
        )
        assert (batch.status, batch.metadata) == ("validating", {"for": "test"})
        assert batch.expires_at == batch.created_at + 86400
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
        assert batch.usage is not None
        assert batch.usage.output_tokens == 20 * 6
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        answers = [
            json.loads(x) for x in (await client.files.content(batch.output_file_id)).text.splitlines()
        ]
        assert {x["custom_id"] for x in answers} == {f"q{i}" for i in range(20)}
        assert len({x["id"] for x in answers}) == 20
        for answer in answers:
            assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
            assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
        assert [x.id async for x in client.batches.list()] == [batch.id]
        assert [x.id async for x in client.files.list(purpose="batch_output")] == [batch.output_file_id]
        with pytest.raises(openai.BadRequestError, match="completed cannot be cancelled"):
            await client.batches.cancel(batch.id)


async def test_lines_are_answered_as_over_http(serve):
    live = await serve(say("Hello"))
    bodies = {
        "good": {"temperature": 0},
        "model": {"model": "other"},
        "range": {"temperature": -1},
        "stream": {"stream": True},
        "type": {"max_tokens": "many"},
        "long": {"prompt": "x" * 5000},
        "echo": {"echo": True, "max_tokens": 0},
    }
    content = jsonl(line(name, **body) for name, body in bodies.items())
    good, bad = await results(live, await finished(live, (await create(live, content))["id"]))
    assert good.keys() == {"good", "echo"}
    assert bad.keys() == bodies.keys() - good.keys()
    assert bad["stream"]["response"]["body"]["error"]["param"] == "stream"
    for name in bodies.keys() - {"stream"}:
        status, over_http = await live.post(COMPLETIONS, line(name, **bodies[name])["body"])
        response = (good | bad)[name]["response"]
        assert response["status_code"] == status
        if status == 200:
            assert response["body"]["choices"] == over_http["choices"]
        else:
            assert response["body"] == over_http
        assert (good | bad)[name]["error"] is None


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
async def test_other_endpoints_take_batches_too(serve, endpoint, body):
    live = await serve(say("Hello"))
    bodies = {"good": body, "bad": body | {"temperature": "hot", "input": 5, "max_tokens": "many"}}
    content = jsonl({"custom_id": name, "url": endpoint, "body": bodies[name]} for name in bodies)
    batch = await finished(live, (await create(live, content, endpoint))["id"])
    good, bad = await results(live, batch)
    assert (good.keys(), bad.keys()) == ({"good"}, {"bad"})
    status, over_http = await live.post(endpoint, bodies["bad"])
    assert bad["bad"]["response"]["status_code"] == status == 400
    assert bad["bad"]["response"]["body"] == over_http
    _, over_http = await live.post(endpoint, body)
    assert good["good"]["response"]["body"].keys() == over_http.keys()
    assert batch["usage"]["input_tokens"] > 0
    assert batch["usage"]["output_tokens"] == over_http["usage"].get("output_tokens", 0)


async def test_bad_lines_fail_the_batch_with_their_numbers(serve):
    live = await serve(say("Hello"))
    lines = [
        line("a"),
        "{broken",
        "",
        {k: v for k, v in line("b").items() if k != "custom_id"},
        line("a"),
        line("c", CHAT),
        line("d") | {"method": "GET"},
        line("e") | {"body": [1]},
        line("x" * 600),
        '{"custom_id": "\\ud800"}',
        '{"body":' * 5000,
        line("fine"),
    ]
    batch = await finished(live, (await create(live, jsonl(lines)))["id"])
    assert batch["status"] == "failed"
    assert batch["failed_at"] >= batch["created_at"]
    assert batch["output_file_id"] is batch["error_file_id"] is None
    found = [(x["line"], x["code"], x["param"]) for x in batch["errors"]["data"]]
    assert found == [
        (2, "invalid_json_line", None),
        (4, "invalid_request_line", "custom_id"),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "mismatched_endpoint", "url"),
        (7, "invalid_method", "method"),
        (8, "invalid_request_line", "body"),
        (9, "invalid_request_line", "custom_id"),
        (10, "invalid_json_line", None),
        (11, "invalid_json_line", None),
    ]
    assert all(x["message"].startswith(f"Line {x['line']}: ") for x in batch["errors"]["data"])
    assert live.engine.made == []


async def test_empty_and_endless_files_fail(serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_LINES", 5)
    live = await serve(say("Hello"))
    empty = await finished(live, (await create(live, b"\n \n"))["id"])
    assert empty["errors"]["data"][0]["code"] == "empty_file"
    endless = await finished(live, (await create(live, many(9)))["id"])
    assert [(x["code"], x["line"]) for x in endless["errors"]["data"]] == [("too_many_lines", 6)]
    assert (await finished(live, (await create(live, many(5)))["id"]))["status"] == "completed"


async def test_a_byte_order_mark_and_other_line_ends_do_no_harm(serve):
    live = await serve(say("Hello"))
    content = b"\xef\xbb\xbf" + many(3).replace(b"\n", b"\r\n").rstrip()
    assert (await finished(live, (await create(live, content))["id"]))["request_counts"]["completed"] == 3


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"endpoint": "/flush_cache"}, 400, "endpoint"),
        ({"completion_window": "24"}, 400, "completion_window"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"input_file_id": "../../etc/passwd"}, 404, None),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"metadata": {"a" * 65: "b"}}, 400, "metadata"),
        ({"metadata": {str(i): "b" for i in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            400,
            "output_expires_after.seconds",
        ),
    ],
)
async def test_mistakes_in_a_new_batch(serve, change, status, param):
    live = await serve(say("Hello"))
    body = {"input_file_id": await upload(live, many(1)), "endpoint": COMPLETIONS, "completion_window": "24h"}
    found, answer = await live.post("/v1/batches", body | change)
    assert (found, answer["error"]["param"]) == (status, param), answer


async def test_result_files_are_no_input(serve):
    live = await serve(say("Hello"))
    batch = await finished(live, (await create(live, many(1)))["id"])
    body = {
        "input_file_id": batch["output_file_id"],
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
    }
    status, answer = await live.post("/v1/batches", body)
    assert (status, answer["error"]["param"]) == (400, "input_file_id")


async def test_lists_come_in_pages(serve):
    live = await serve(say("Hello"))
    made = [(await create(live, many(1)))["id"] for _ in range(5)][::-1]
    status, page = await live.get("/v1/batches?limit=2")
    assert status == 200
    assert ([x["id"] for x in page["data"]], page["has_more"]) == (made[:2], True)
    assert (page["first_id"], page["last_id"]) == (made[0], made[1])
    _, page = await live.get(f"/v1/batches?limit=3&after={made[1]}")
    assert ([x["id"] for x in page["data"]], page["has_more"]) == (made[2:], False)
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("after=batch_0", "after")):
        status, answer = await live.get(f"/v1/batches?{query}")
        assert (status, answer["error"]["param"]) == (400, param)
    for path in ("batch_0", "..%2f..%2fetc"):
        assert (await live.get(f"/v1/batches/{path}"))[0] == 404
        assert (await live.post(f"/v1/batches/{path}/cancel", {}))[0] == 404
