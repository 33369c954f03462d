"""Batches while they run: cancelled, expired, beside live calls and other tenants, on a full disk."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

import pytest

from helpers.batch_client import answered, create, finished, jsonl, line, lines_of, results, upload
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import COMPLETIONS, Live, eventually
from tierax.serving.batch import results as result_files
from tierax.serving.batch import runner as batch_runner
from tierax.serving.batch.dispatch import PRIORITY
from tierax.serving.core.keys import SERVICE
from tierax.serving.http.auth import salted
from tierax.serving.http.errors import unavailable

pytestmark = pytest.mark.asyncio


def many(count: int, **body: Any) -> bytes:
    return jsonl(line(f"q{i}", **body) for i in range(count))


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
