"""Batches and files of a live server, as tests ask for them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable
from typing import Any

from aiohttp import FormData
from openai.types import Batch

from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """A line of a batch; its prompt is its id, unless it is a chat."""
    fields = {"messages": MESSAGES} if url == CHAT else {"prompt": custom_id}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields | body}


def jsonl(lines: Iterable[dict[str, Any] | str]) -> bytes:
    """A file of these lines; texts stand as they are."""
    return b"".join((x if isinstance(x, str) else json.dumps(x)).encode() + b"\n" for x in lines)


async def send(
    live: Live,
    content: bytes,
    *,
    name: str = "in.jsonl",
    fields: Any = (("purpose", "batch"),),
    **options: Any,
) -> tuple[int, Any]:
    """Status and answer of an upload."""
    form = FormData(list(fields))
    form.add_field("file", io.BytesIO(content), filename=name)
    async with live.session.post(f"{live.url}/v1/files", data=form, **options) as response:
        return response.status, await response.json()


async def upload(live: Live, content: bytes, **options: Any) -> str:
    """The id of an uploaded file."""
    status, answer = await send(live, content, **options)
    assert status == 200, answer
    return answer["id"]


async def create(live: Live, content: bytes, endpoint: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    """A new batch over a new file."""
    body = {"input_file_id": await upload(live, content), "endpoint": endpoint, "completion_window": "24h"}
    status, batch = await live.post("/v1/batches", body | fields)
    assert status == 200, batch
    Batch.model_validate(batch, strict=True)
    return batch


async def answered(live: Live, batch_id: str, count: int) -> None:
    """Waits until a batch has so many answers, as it tells itself: what the engine has finished may not have reached it."""
    async with asyncio.timeout(60):
        while (await live.get(f"/v1/batches/{batch_id}"))[1]["request_counts"]["completed"] < count:
            await asyncio.sleep(0.005)


async def finished(live: Live, batch_id: str, seconds: float = 60.0) -> dict[str, Any]:
    """The batch once nothing more happens to it; its figures add up."""
    for _ in range(int(seconds / 0.02)):
        status, batch = await live.get(f"/v1/batches/{batch_id}")
        assert status == 200, batch
        Batch.model_validate(batch, strict=True)
        if batch["status"] in ENDED:
            counts = batch["request_counts"]
            if batch["status"] != "failed":
                assert counts["completed"] + counts["failed"] == counts["total"], batch
            return batch
        await asyncio.sleep(0.02)
    raise AssertionError(f"batch {batch_id} does not end")


async def lines_of(live: Live, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file; none without one."""
    if file_id is None:
        return []
    async with live.session.get(f"{live.url}/v1/files/{file_id}/content") as response:
        assert response.status == 200
        return [json.loads(raw) for raw in (await response.text()).splitlines()]


async def results(live: Live, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Output and error lines by their custom_ids, of which none may occur twice."""
    good = await lines_of(live, batch["output_file_id"])
    bad = await lines_of(live, batch["error_file_id"])
    ids = [x["custom_id"] for x in good + bad]
    assert len(set(ids)) == len(ids)
    return {x["custom_id"]: x for x in good}, {x["custom_id"]: x for x in bad}
