"""Batches over the end of a server: what one leaves in its directory, the next takes up, whatever the moment was."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.batch_client import create, finished, jsonl, line, results
from helpers.fake_engine import babble
from helpers.live_server import COMPLETIONS, eventually
from tierax.serving.batch.dispatch import PRIORITY
from tierax.serving.batch.records import Batch, BatchRecord
from tierax.serving.batch.store import Store, Upload, new_id
from tierax.serving.core.keys import BATCHES, SERVICE

pytestmark = pytest.mark.asyncio


def many(count: int, **body: Any) -> bytes:
    return jsonl(line(f"q{i}", **body) for i in range(count))


async def test_a_restart_goes_on_where_the_server_ended(serve, tmp_path):
    first = await serve(babble, step_seconds=0.002, batch_concurrency=4, data_dir=str(tmp_path))
    batch = await create(first, many(60, max_tokens=8))
    await eventually(lambda: first.engine.stats.finished.get("length", 0) >= 10)
    await first.stop()
    answered = first.engine.stats.finished["length"]
    second = await serve(babble, data_dir=str(tmp_path))
    ended = await finished(second, batch["id"])
    assert (ended["status"], ended["request_counts"]) == (
        "completed",
        {"total": 60, "completed": 60, "failed": 0},
    )
    good, _ = await results(second, ended)
    assert len(good) == 60
    assert 60 - answered <= len(second.engine.made) < 60
    assert ended["usage"]["output_tokens"] == 60 * 8


@pytest.mark.parametrize("torn", [b'{"id":"batch', b'{"id":"batch_req_12","custom_id":"q1","respon'])
async def test_a_kill_at_any_moment_loses_and_doubles_nothing(serve, tmp_path, torn):
    """A copy of the directory as it is at one moment, torn line included, is what kill -9 would leave."""
    live = await serve(babble, step_seconds=0.002, batch_concurrency=4)
    batch = await create(live, many(40, max_tokens=8))
    await eventually(lambda: live.engine.stats.finished.get("length", 0) >= 10)
    there, copy = Path(live.data.name), tmp_path / "copy"
    await live.app[BATCHES].archive.run(lambda _: shutil.copytree(there, copy))
    record = await live.app[BATCHES].find(batch["id"], "")
    with (copy / "files" / record.output_id).open("ab") as file:
        file.write(torn)
    (copy / "files" / "file-00000000000000000000000000000000.part").write_bytes(b"half an upload")
    second = await serve(babble, data_dir=str(copy))
    ended = await finished(second, batch["id"])
    good, bad = await results(second, ended)
    assert ended["status"] == "completed"
    assert (len(good), bad) == (40, {})
    assert 20 <= len(second.engine.made) <= 30
    assert not list((copy / "files").glob("*.part"))


async def test_a_kill_while_finalizing_ends_the_same(serve, tmp_path):
    live = await serve(babble, step_seconds=0.002, batch_concurrency=4)
    batch = await create(live, many(40, max_tokens=8))
    await eventually(lambda: live.engine.stats.finished.get("length", 0) >= 10)
    copy = tmp_path / "copy"
    await live.post(f"/v1/batches/{batch['id']}/cancel", {})
    await live.app[BATCHES].archive.run(lambda _: shutil.copytree(live.data.name, copy))
    second = await serve(babble, data_dir=str(copy))
    ended = await finished(second, batch["id"])
    assert ended["status"] == "cancelled"
    good, bad = await results(second, ended)
    assert good.keys() | bad.keys() == {f"q{i}" for i in range(40)}
    assert second.engine.made == []


async def test_a_kill_after_a_cancel_before_the_file_was_read(serve, tmp_path):
    store = Store(tmp_path, 10**6, time.time)
    part = Upload(store)
    part.write(many(4))
    file = part.finish(tenant="", filename="in.jsonl", purpose="batch", seconds=None)
    part.discard()
    batch = Batch(
        id=new_id("batch_"),
        endpoint=COMPLETIONS,
        input_file_id=file.id,
        completion_window="24h",
        created_at=0,
        expires_at=2**40,
        status="cancelling",
        cancelling_at=1,
    )
    record = BatchRecord(batch=batch, tenant="", output_id=new_id("file-"), error_id=new_id("file-"))
    store.add_batch(record, 1)
    store.close()
    live = await serve(babble, data_dir=str(tmp_path))
    ended = await finished(live, batch.id)
    assert (ended["status"], ended["request_counts"]["total"]) == ("cancelled", 4)
    assert live.engine.made == []


async def test_shutting_down_does_not_wait_for_batches(serve):
    live = await serve(babble, step_seconds=0.01)
    await create(live, many(20, max_tokens=4000))
    await eventually(lambda: len(live.thread.running) > 0)
    started = time.monotonic()
    await live.app[SERVICE].drain(20.0)
    assert time.monotonic() - started < 2
    assert live.thread.running == {} or all(r.priority == PRIORITY for r, _ in live.thread.running.values())


async def test_an_input_file_that_vanished_fails_the_batch(serve, tmp_path):
    first = await serve(babble, step_seconds=0.01, data_dir=str(tmp_path))
    batch = await create(first, many(5, max_tokens=4000))
    await eventually(lambda: len(first.thread.running) > 0)
    await first.stop()
    (tmp_path / "files" / batch["input_file_id"]).unlink()
    second = await serve(babble, data_dir=str(tmp_path))
    ended = await finished(second, batch["id"])
    assert ended["errors"]["data"][0]["code"] == "input_file_missing"
