"""`/v1/batches`: many calls in one file, answered behind the live traffic's back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from ..core.keys import BATCHES, CONFIG, NOW, SERVICE
from ..http.auth import tenant_name
from ..http.body import read_as
from ..http.errors import bad_request, json_response
from ..http.queries import query_of
from ..openai.bodies import decode
from ..openapi.document import Documented
from .archive import Archive
from .dispatch import Dispatcher
from .files import (
    MAX_LIFE,
    MIN_LIFE,
    delete_file,
    file_content,
    list_files,
    show_file,
    upload_file,
)
from .records import Batch, BatchRecord
from .runner import BatchRunner
from .store import new_id

MAX_WINDOW = 30 * 86400
"""Seconds that a batch may be given."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """When the result files go."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=MIN_LIFE, le=MAX_LIFE)]


class BatchBody(msgspec.Struct, kw_only=True):
    """Body of `/v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    """Such as `24h`, `30m` or `7d`; what is not done by then ends as `expired`."""
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchesQuery(msgspec.Struct, kw_only=True):
    """Which batches to list."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    after: str | None = None


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches, the latest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def add_batches(app: web.Application, model: str) -> None:
    """Adds files and batches to an application that has all its other routes already."""
    config, now = app[CONFIG], app[NOW]
    app[BATCHES] = BatchRunner(
        Archive(config, model, now),
        Dispatcher(app),
        app[SERVICE],
        now,
        concurrency=config.batch_concurrency,
        max_line=config.max_body_size + 2**16,
    )
    app.cleanup_ctx.append(_run_batches)
    router = app.router
    router.add_post("/v1/files", upload_file)
    router.add_get("/v1/files", list_files)
    router.add_get("/v1/files/{file_id}", show_file)
    router.add_get("/v1/files/{file_id}/content", file_content)
    router.add_delete("/v1/files/{file_id}", delete_file)
    router.add_post("/v1/batches", create_batch)
    router.add_get("/v1/batches", list_batches)
    router.add_get("/v1/batches/{batch_id}", show_batch)
    router.add_post("/v1/batches/{batch_id}/cancel", cancel_batch)


@Documented(body=BatchBody, answer=Batch)
async def create_batch(request: web.Request) -> web.Response:
    """Begins to answer the lines of an uploaded file."""
    runner, now = request.app[BATCHES], int(request.app[NOW]())
    body = await read_as(request, partial(decode, kind=BatchBody))
    if body.endpoint not in runner.dispatcher.endpoints:
        known = ", ".join(runner.dispatcher.endpoints)
        raise bad_request(f"endpoint must be one of {known}.", "endpoint")
    _check_metadata(body.metadata or {})
    record = BatchRecord(
        batch=Batch(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + _window(body.completion_window),
            metadata=body.metadata,
        ),
        tenant=tenant_name(request),
        output_id=new_id("file-"),
        error_id=new_id("file-"),
        results_live=body.output_expires_after.seconds if body.output_expires_after else None,
    )
    # What is sent is the batch as it was made, whatever has become of it meanwhile.
    made = msgspec.json.encode(record.batch)
    await runner.create(record)
    return json_response(msgspec.Raw(made))


@Documented(query=BatchesQuery, answer=BatchList)
async def list_batches(request: web.Request) -> web.Response:
    """The batches of the caller, a page at a time."""
    query = query_of(request, BatchesQuery)
    found, more = await request.app[BATCHES].page(tenant_name(request), after=query.after, limit=query.limit)
    data = [record.batch for record in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(BatchList(data=data, first_id=first, last_id=last, has_more=more))


@Documented(answer=Batch)
async def show_batch(request: web.Request) -> web.Response:
    """How far a batch is."""
    record = await request.app[BATCHES].find(request.match_info["batch_id"], tenant_name(request))
    return json_response(record.batch)


@Documented(answer=Batch)
async def cancel_batch(request: web.Request) -> web.Response:
    """Ends a batch early; the answers that it has so far stay."""
    record = await request.app[BATCHES].cancel(request.match_info["batch_id"], tenant_name(request))
    return json_response(record.batch)


def _window(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,5})([mhd])", text, re.ASCII)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW:
        message = "completion_window must be minutes, hours or days such as 30m, 24h or 7d, 30 days at most."
        raise bad_request(message, "completion_window")
    return seconds


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad_request(f"metadata may have {MAX_METADATA} entries.", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            message = f"metadata: a key may have {MAX_METADATA_KEY} characters, a value {MAX_METADATA_VALUE}."
            raise bad_request(message, "metadata")


async def _run_batches(app: web.Application) -> AsyncIterator[None]:
    runner = app[BATCHES]
    working = asyncio.create_task(runner.run())
    yield
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    await runner.archive.close()
