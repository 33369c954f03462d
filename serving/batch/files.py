"""`/v1/files`: uploads for batches, and what batches give."""

from __future__ import annotations

import string
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from ..core.keys import BATCHES, CONFIG
from ..http.auth import tenant_name
from ..http.errors import ApiError, bad_request, json_response
from ..http.queries import query_of
from ..openapi.document import Documented
from .records import FileObject
from .store import Upload

MAX_FIELD = 4096
"""Bytes of a field of the form that is not the file."""
MIN_LIFE, MAX_LIFE = 3600, 30 * 86400
"""Seconds that a file may be told to live."""
_CHUNK = 2**18
_PLAIN = ("", "7bit", "8bit", "binary")


class UploadForm(msgspec.Struct, kw_only=True):
    """The form of an upload."""

    file: str
    purpose: Literal["batch"]


class FilesQuery(msgspec.Struct, kw_only=True):
    """Which files to list."""

    purpose: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@Documented(body=UploadForm, body_media="multipart/form-data", answer=FileObject)
async def upload_file(request: web.Request) -> web.Response:
    """Stores a file, whose purpose must be `batch`."""
    archive, limit = request.app[BATCHES].archive, request.app[CONFIG].max_file_size
    _check_form(request, limit)
    upload = await archive.run(Upload)
    try:
        fields: dict[str, str] = {}
        filename: str | None = None
        with _damaged_is_a_400():
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader) or part.name is None:
                    raise bad_request("Each part of the form needs a name, and must not be a form itself.")
                if part.name != "file":
                    fields[part.name] = await _text(part)
                    continue
                if filename is not None or not part.filename:
                    raise bad_request("Send one file, with a file name, in the part `file`.", "file")
                filename = part.filename
                async for chunk in _chunks(part):
                    if upload.size + len(chunk) > limit:
                        raise _too_large(limit)
                    await archive.run(lambda _, chunk=chunk: upload.write(chunk))
        if filename is None:
            raise bad_request("The form has no part `file`.", "file")
        if fields.get("purpose") != "batch":
            raise bad_request("purpose must be batch.", "purpose")
        seconds = _seconds(fields)
        tenant, name = tenant_name(request), _readable(filename)
        kept = await archive.run(
            lambda _: upload.finish(tenant=tenant, filename=name, purpose="batch", seconds=seconds)
        )
    finally:
        archive.run_later(lambda _: upload.discard())
    return json_response(kept)


@Documented(query=FilesQuery, answer=FileList)
async def list_files(request: web.Request) -> web.Response:
    """The files of the caller, a page at a time."""
    query, tenant = query_of(request, FilesQuery), tenant_name(request)
    data, more = await request.app[BATCHES].archive.run(
        lambda store: store.files(
            tenant, purpose=query.purpose, after=query.after, limit=query.limit, order=query.order
        )
    )
    ids = [file.id for file in data]
    return json_response(
        FileList(data=data, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=more)
    )


@Documented(answer=FileObject)
async def show_file(request: web.Request) -> web.Response:
    """What is known of a file."""
    file_id, tenant = request.match_info["file_id"], tenant_name(request)
    return json_response(await request.app[BATCHES].archive.run(lambda store: store.file(file_id, tenant)))


@Documented(answer=bytes)
async def file_content(request: web.Request) -> web.StreamResponse:
    """The content of a file, byte for byte; ranges are honoured."""
    file_id, tenant = request.match_info["file_id"], tenant_name(request)
    _, path = await request.app[BATCHES].archive.run(lambda store: store.content(file_id, tenant))
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
    }
    return web.FileResponse(path, headers=headers)


@Documented(answer=FileDeleted)
async def delete_file(request: web.Request) -> web.Response:
    """Deletes a file that no batch is reading."""
    file_id, tenant = request.match_info["file_id"], tenant_name(request)
    await request.app[BATCHES].archive.run(lambda store: store.delete(file_id, tenant))
    return json_response(FileDeleted(id=file_id))


def _check_form(request: web.Request, limit: int) -> None:
    if request.content_type != "multipart/form-data":
        raise bad_request("Send the file as a form: Content-Type multipart/form-data.")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "Uploads cannot be compressed.", code="unsupported_encoding")
    if request.content_length is not None and request.content_length > limit + 16 * MAX_FIELD:
        raise _too_large(limit)


async def _text(part: BodyPartReader) -> str:
    text = bytearray()
    async for chunk in _chunks(part):
        text += chunk
        if len(text) > MAX_FIELD:
            raise bad_request(f"{_readable(part.name or '')} has more than {MAX_FIELD} bytes.", part.name)
    return text.decode()


async def _chunks(part: BodyPartReader) -> AsyncIterator[bytes]:
    if part.headers.get("Content-Transfer-Encoding", "").lower() not in _PLAIN:
        raise bad_request("Send the parts of the form as they are, without Content-Transfer-Encoding.")
    while chunk := await part.read_chunk(_CHUNK):
        yield chunk


@contextmanager
def _damaged_is_a_400() -> Iterator[None]:
    try:
        yield
    except (ValueError, AssertionError, HttpProcessingError):
        raise bad_request("The form is cut off, or not valid multipart/form-data.") from None


def _seconds(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or seconds is None or not set(seconds) <= set(string.digits) or not seconds:
        raise bad_request("expires_after needs anchor: created_at, and seconds.", "expires_after")
    if not MIN_LIFE <= (number := int(seconds[:9])) <= MAX_LIFE:
        raise bad_request(f"expires_after.seconds must be from {MIN_LIFE} to {MAX_LIFE}.", "expires_after")
    return number


def _readable(name: str) -> str:
    """A name as it can be shown again; it is never a path."""
    return name[:255].encode("utf-8", "replace").decode()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"A file may have {limit} bytes here.", param="file", code="file_too_large")
