"""Batches: every line answered once, by the code that answers over HTTP, whatever happens to the server meanwhile."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from typing import Any

import openai
import pytest

from helpers.batch_client import answered, create, finished, jsonl, line, lines_of, results, upload
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import CHAT, COMPLETIONS, Live, eventually
from tierax.serving.batch import results as result_files
from tierax.serving.batch import runner as batch_runner
from tierax.serving.batch.dispatch import PRIORITY
from tierax.serving.core.keys import SERVICE
from tierax.serving.http.auth import salted
from tierax.serving.http.errors import unavailable

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


async def test_a_cancelled_batch_keeps_what_it_has(serve):
    live = await serve(babble, step_seconds=0.002, batch_concurrency=4)
    batch = await create(live, many(300, max_tokens=8))
    await answered(live, batch["id"], 5)
    status, answer = await live.post(f"/v1/batches/{batch['id']}/cancel", {})
    assert (status, answer["status"]) == (200, "cancelling")
    ended = await finished(live, batch["id"])
    assert ended["status"] == "cancelled"
    assert ended["cancelled_at"] >= ended["cancelling_at"] >= ended["created_at"]
    good, bad = await results(live, ended)
    assert len(good) >= 5
    assert bad
    assert good.keys() | bad.keys() == {f"q{i}" for i in range(300)}
    assert {x["error"]["code"] for x in bad.values()} == {"batch_cancelled"}
    await eventually(lambda: not live.thread.running and not live.thread.waiting)
    assert (await live.post(f"/v1/batches/{batch['id']}/cancel", {}))[1]["status"] == "cancelled"


async def test_what_the_window_leaves_open_expires(serve):
    late = [0.0]
    live = await serve(babble, step_seconds=0.002, batch_concurrency=4, now=lambda: time.time() + late[0])
    batch = await create(live, many(300, max_tokens=8), completion_window="30m")
    await answered(live, batch["id"], 5)
    late[0] = 1800.0
    ended = await finished(live, batch["id"])
    assert ended["status"] == "expired"
    assert ended["expired_at"] >= ended["expires_at"]
    good, bad = await results(live, ended)
    assert len(good) >= 5
    assert good.keys() | bad.keys() == {f"q{i}" for i in range(300)}
    assert {x["error"]["code"] for x in bad.values()} == {"batch_expired"}


async def test_tenants_see_only_their_own(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("key-a tenant-a\nkey-b tenant-b\nkey-c tenant-a\nkey-op\n")
    live = await serve(say("Hello"), api_key_file=str(keys))
    a, b, c, op = ({"headers": {"Authorization": f"Bearer key-{name}"}} for name in ("a", "b", "c", "op"))
    file_id = await upload(live, many(2), **a)
    body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    assert (await live.post("/v1/batches", body, **b))[0] == 404
    status, batch = await live.post("/v1/batches", body, **a)
    assert status == 200
    path = f"/v1/batches/{batch['id']}"

    async def ended() -> dict[str, Any]:
        while (found := (await live.get(path, **c))[1])["status"] != "completed":
            await asyncio.sleep(0.02)
        return found

    output = (await asyncio.wait_for(ended(), 60))["output_file_id"]
    assert {request.namespace for request in live.engine.made} == {salted("tenant-a", None)}
    for other in (b, op):
        assert (await live.get(path, **other))[0] == 404
        assert (await live.post(f"{path}/cancel", {}, **other))[0] == 404
        assert (await live.get("/v1/batches", **other))[1]["data"] == []
        assert (await live.get("/v1/files", **other))[1]["data"] == []
        assert (await live.get(f"/v1/batches?after={batch['id']}", **other))[0] == 400
        for name in (file_id, output):
            assert (await live.get(f"/v1/files/{name}", **other))[0] == 404
            assert (await live.get(f"/v1/files/{name}/content", **other))[0] == 404
            assert (await live.request("DELETE", f"/v1/files/{name}", **other))[0] == 404
    assert {x["id"] for x in (await live.get("/v1/files", **c))[1]["data"]} == {file_id, output}


async def test_live_calls_come_first(serve):
    live = await serve(babble, max_running=1, batch_concurrency=8, step_seconds=0.002)
    calls = [asyncio.create_task(live.complete(max_tokens=100)) for _ in range(3)]
    await eventually(lambda: live.engine.stats.waiting >= 2)
    batch = await create(live, many(30, max_tokens=2, priority=-5))
    await asyncio.gather(calls[0], calls[1])
    # While others wait, a batch has one line in the engine, behind all of them.
    lines = live.engine.made[3:]
    assert [request.priority for request in lines] == [PRIORITY]
    await calls[2]
    assert (await finished(live, batch["id"]))["request_counts"]["completed"] == 30
    assert {request.priority for request in live.engine.made[3:]} == {PRIORITY}


async def test_no_more_lines_at_once_than_allowed(serve):
    most = [0]
    engine = FakeEngine(babble)
    live = await serve(engine=engine, batch_concurrency=3, step_seconds=0.001)

    async def watch() -> None:
        while True:
            most[0] = max(most[0], len(live.thread.running) + len(live.thread.waiting))
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    batches = [await create(live, many(15, max_tokens=4)) for _ in range(2)]
    for batch in batches:
        assert (await finished(live, batch["id"]))["status"] == "completed"
    watching.cancel()
    assert 1 < most[0] <= 3


async def test_cancelled_batches_give_their_places_back(serve):
    live = await serve(babble, step_seconds=0.005, batch_concurrency=2)
    for _ in range(4):
        batch = await create(live, many(8, max_tokens=4000))
        await eventually(lambda: len(live.thread.running) > 0)
        await live.post(f"/v1/batches/{batch['id']}/cancel", {})
        assert (await finished(live, batch["id"]))["status"] == "cancelled"
    batch = await finished(live, (await create(live, many(8, max_tokens=2)))["id"])
    assert batch["status"] == "completed"


async def test_a_line_that_the_server_has_no_room_for_is_tried_again(serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "PATIENCE", 0.01)
    live = await serve(babble, step_seconds=0.002)
    batch = await create(live, many(6, max_tokens=20))
    await eventually(lambda: len(live.thread.running) == 6)
    live.app[SERVICE].fail_open(unavailable("No room.", "queue_full"))
    ended = await finished(live, batch["id"])
    assert ended["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    assert len(live.engine.made) == 12


async def test_a_fault_of_the_engine_is_told_in_the_error_file(serve):
    live = await serve(babble, step_seconds=0.001)
    live.thread.fault = "the device was lost"
    ended = await finished(live, (await create(live, many(2)))["id"])
    good, bad = await results(live, ended)
    assert good == {}
    for answer in bad.values():
        assert answer["response"]["status_code"] == 500
        assert answer["response"]["body"]["error"]["message"] == "the device was lost"


async def test_a_full_disk_holds_a_batch_up_and_nothing_else(serve, monkeypatch, caplog):
    monkeypatch.setattr(batch_runner, "PATIENCE", 0.01)
    full = [True]
    write = result_files.os.write

    def short_of_room(fd: int, raw: bytes) -> int:
        if full[0]:
            # A part of the line still fits.
            write(fd, raw[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, raw)

    monkeypatch.setattr(result_files.os, "write", short_of_room)
    live = await serve(say("Hello"))
    batch = await create(live, many(5))
    await eventually(lambda: "waits for the disk" in caplog.text)
    assert (await live.complete())["choices"][0]["text"] == "Hello"
    assert (await live.get(f"/v1/batches/{batch['id']}"))[1]["status"] == "in_progress"
    full[0] = False
    good, bad = await results(live, await finished(live, batch["id"]))
    assert (len(good), bad) == (5, {})
    assert len(live.engine.made) == 6


async def test_an_input_file_in_use_stays(serve):
    live = await serve(babble, step_seconds=0.01)
    batch = await create(live, many(5, max_tokens=4000))
    path = f"/v1/files/{batch['input_file_id']}"
    status, answer = await live.request("DELETE", path)
    assert (status, answer["error"]["code"]) == (409, "file_in_use")
    await live.post(f"/v1/batches/{batch['id']}/cancel", {})
    await finished(live, batch["id"])
    assert (await live.request("DELETE", path))[0] == 200


async def test_a_tenant_has_a_bounded_number_of_batches(serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_ACTIVE", 2)
    live = await serve(babble, step_seconds=0.01)
    for _ in range(2):
        await create(live, many(1, max_tokens=4000))
    body = {"input_file_id": await upload(live, many(1)), "endpoint": COMPLETIONS, "completion_window": "24h"}
    status, answer = await live.post("/v1/batches", body)
    assert (status, answer["error"]["code"]) == (429, "too_many_batches")


async def test_results_expire_when_asked_to(serve):
    late = [0.0]
    live: Live = await serve(say("Hello"), now=lambda: time.time() + late[0])
    after = {"anchor": "created_at", "seconds": 3600}
    batch = await finished(live, (await create(live, many(1), output_expires_after=after))["id"])
    assert len(await lines_of(live, batch["output_file_id"])) == 1
    late[0] = 3601.0
    assert (await live.get(f"/v1/files/{batch['output_file_id']}"))[0] == 404
