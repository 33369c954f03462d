"""Files: stored as they came, private to their tenant, within bounds, and never found by a name of a client's choice."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import FileObject

from helpers.batch_client import jsonl, line, send, upload
from helpers.fake_engine import say
from helpers.live_server import Live, eventually
from tierax.engine.config import ConfigError
from tierax.serving.batch import store as batch_store
from tierax.serving.batch.archive import check_data_dir, data_directory
from tierax.serving.batch.store import DATABASE, InUse, Store, Upload
from tierax.serving.config import ServerConfig
from tierax.serving.server import run

pytestmark = pytest.mark.asyncio

FORM = "multipart/form-data; boundary=b"
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'


def stored(live: Live) -> list[str]:
    """Names in the directory of contents."""
    return sorted(os.listdir(Path(live.data.name) / "files"))


async def content(live: Live, file_id: str, **headers: str) -> tuple[int, bytes]:
    async with live.session.get(f"{live.url}/v1/files/{file_id}/content", headers=headers) as response:
        return response.status, await response.read()


async def test_the_openai_client_keeps_files(serve):
    live = await serve(say("Hello"), api_key="right")
    raw = jsonl([line("a"), line("b")])
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="right", max_retries=0) as client:
        files = [await client.files.create(file=(f"{i}.jsonl", raw), purpose="batch") for i in range(5)]
        FileObject.model_validate(files[0].model_dump(), strict=True)
        assert (files[3].filename, files[3].bytes, files[3].purpose) == ("3.jsonl", len(raw), "batch")
        assert (await client.files.content(files[3].id)).content == raw
        assert (await client.files.retrieve(files[3].id)).filename == "3.jsonl"
        assert [x.id async for x in client.files.list(limit=2)] == [x.id for x in files[::-1]]
        assert [x.id async for x in client.files.list(limit=2, order="asc")] == [x.id for x in files]
        assert [x.id async for x in client.files.list(purpose="batch_output")] == []
        assert (await client.files.delete(files[3].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(files[3].id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(files[3].id)
        with pytest.raises(openai.NotFoundError):
            await client.files.delete(files[3].id)
        with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
            await client.files.create(file=("a", raw), purpose="fine-tune")
        limited = await client.files.create(
            file=("a", raw), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert limited.expires_at == limited.created_at + 3600
    assert len(stored(live)) == 5


async def test_bytes_come_back_as_they_were_and_in_ranges(serve):
    live = await serve(say("Hello"))
    raw = os.urandom(700_000) + b"\r\n--boundary\r\n"
    file_id = await upload(live, raw)
    assert await content(live, file_id) == (200, raw)
    assert await content(live, file_id, Range="bytes=10-19") == (206, raw[10:20])


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "..", "x" * 400, "a; filename=c", "naïve 🙂.jsonl", "\udcff\udcfe"],
)
async def test_a_file_name_is_only_a_text(serve, name):
    live = await serve(say("Hello"))
    head = HEAD.replace(b'"a"', b'"' + name.encode("utf-8", "surrogateescape") + b'"')
    body = PURPOSE + head + b"\r\n{}\n\r\n--b--\r\n"
    status, answer = await live.post("/v1/files", body, headers={"Content-Type": FORM})
    assert status == 200, answer
    file_id = answer["id"]
    if name.isprintable():
        assert (await live.get(f"/v1/files/{file_id}"))[1]["filename"] == name.lstrip("/")[:255]
    assert stored(live) == [file_id]
    async with live.session.get(f"{live.url}/v1/files/{file_id}/content") as response:
        assert await response.read() == b"{}\n"
        assert response.headers["Content-Disposition"] == "attachment"
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "file_id",
    ["..", "..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "tierax.sqlite3", "file-0", "%00", "..%5cx"],
)
async def test_an_id_is_never_a_path(serve, file_id):
    live = await serve(say("Hello"))
    await upload(live, b"{}\n")
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        status, answer = await live.request(method, f"/v1/files/{file_id}{path}")
        assert status in (400, 404, 405), answer
    assert len(stored(live)) == 1


async def test_nobody_else_reads_the_directory(serve):
    live = await serve(say("Hello"))
    file_id = await upload(live, b"{}\n")
    root = Path(live.data.name)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "files").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "files" / file_id).stat().st_mode) == 0o600


async def test_a_link_in_place_of_a_file_is_not_followed(serve, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    live = await serve(say("Hello"))
    file_id = await upload(live, b"{}\n")
    place = Path(live.data.name) / "files" / file_id
    place.unlink()
    place.symlink_to(secret)
    status, raw = await content(live, file_id)
    assert status == 404
    assert b"secret" not in raw
    assert (await live.request("DELETE", f"/v1/files/{file_id}"))[0] == 200
    assert secret.exists()


async def test_a_file_that_is_too_large_is_refused_while_it_comes(serve):
    live = await serve(say("Hello"), max_file_size=1000)
    assert await upload(live, b"x" * 1000)
    status, answer = await send(live, b"x" * 1001)
    assert (status, answer["error"]["code"]) == (413, "file_too_large")
    status, answer = await send(live, b"x" * 2_000_000)
    assert (status, answer["error"]["code"]) == (413, "file_too_large")
    await eventually(lambda: len(stored(live)) == 1)


async def test_the_quota_bounds_all_files_together(serve):
    live = await serve(say("Hello"), data_quota=2000)
    first = await upload(live, b"x" * 1500)
    status, answer = await send(live, b"x" * 501)
    assert (status, answer["error"]["code"]) == (413, "storage_quota_exceeded")
    second = await upload(live, b"x" * 500)
    assert (await send(live, b"x"))[0] == 413
    body = {"input_file_id": second, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await live.post("/v1/batches", body))[0] == 413
    await live.request("DELETE", f"/v1/files/{first}")
    assert await upload(live, b"x" * 1500)


async def test_a_full_disk_is_told_and_hurts_nobody_else(serve, monkeypatch):
    live = await serve(say("Hello"))
    await upload(live, b"{}\n")

    def full(self: Upload, chunk: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(batch_store.Upload, "write", full)
        status, answer = await send(live, b"x" * 300_000)
        assert (status, answer["error"]["code"]) == (507, "disk_full")
        assert (await live.complete())["choices"][0]["text"] == "Hello"
    await eventually(lambda: len(stored(live)) == 1)
    assert await upload(live, b"{}\n")


async def test_a_database_without_room_is_told_too(serve):
    live = await serve(say("Hello"))
    await upload(live, b"{}\n")
    archive = next(value for value in live.app.values() if hasattr(value, "archive")).archive
    await archive.run(lambda store: store._database.execute("PRAGMA max_page_count = 1"))
    status, answer = 200, {}
    while status == 200:
        status, answer = await send(live, b"{}\n", name="x" * 255)
    assert (status, answer["error"]["code"]) == (507, "disk_full")
    assert (await live.get("/v1/files"))[0] == 200


BAD_FORMS: list[tuple[str, bytes]] = [
    ("application/json", b"{}"),
    ("multipart/form-data", b""),
    ("multipart/form-data; boundary=" + "b" * 100, b""),
    (FORM, b""),
    (FORM, b"--b--\r\n"),
    (FORM, PURPOSE + b"--b--\r\n"),
    (FORM, PURPOSE + HEAD + b"\r\n{}"),
    (FORM, PURPOSE + HEAD),
    (FORM, HEAD + b"\r\n{}\r\n--b--\r\n"),
    (FORM, PURPOSE + HEAD + b"\r\n{}\r\n" + HEAD + b"\r\n{}\r\n--b--\r\n"),
    (FORM, PURPOSE + HEAD + b"Content-Transfer-Encoding: base64\r\n\r\ne30=\r\n--b--\r\n"),
    (FORM, PURPOSE.replace(b"batch", b"b" * 5000) + HEAD + b"\r\n{}\r\n--b--\r\n"),
    (FORM, PURPOSE.replace(b"batch", b"\xff") + HEAD + b"\r\n{}\r\n--b--\r\n"),
    (FORM, PURPOSE + HEAD.replace(b'; filename="a"', b"") + b"\r\n{}\r\n--b--\r\n"),
    (FORM, PURPOSE + HEAD.replace(b'; name="file"', b"") + b"\r\n{}\r\n--b--\r\n"),
    (FORM, b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c--\r\n--b--\r\n"),
    (FORM, b"\0" * 1000),
]


@pytest.mark.parametrize(("kind", "body"), BAD_FORMS)
async def test_forms_that_make_no_sense(serve, kind, body):
    live = await serve(say("Hello"))
    status, answer = await live.post("/v1/files", body, headers={"Content-Type": kind})
    assert status == 400, answer
    assert answer["error"]["message"]
    await eventually(lambda: not (Path(live.data.name) / "files").exists() or stored(live) == [])
    assert await upload(live, b"{}\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"expires_after[anchor]": "created_at"},
        {"expires_after[seconds]": "3600"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 30},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "-1"},
        {"expires_after[anchor]": "last_active_at", "expires_after[seconds]": "3600"},
    ],
)
async def test_when_a_file_expires_must_make_sense(serve, fields):
    live = await serve(say("Hello"))
    status, answer = await send(live, b"{}\n", fields=(("purpose", "batch"), *fields.items()))
    assert (status, answer["error"]["param"]) == (400, "expires_after")


async def test_compressed_uploads_are_refused(serve):
    live = await serve(say("Hello"))
    status, answer = await live.post(
        "/v1/files", b"x", headers={"Content-Type": FORM, "Content-Encoding": "gzip"}
    )
    assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "order=up", "after=file-0"])
async def test_mistakes_in_a_query(serve, query):
    live = await serve(say("Hello"))
    status, answer = await live.get(f"/v1/files?{query}")
    assert (status, answer["error"]["param"]) == (400, query.partition("=")[0])


async def test_an_upload_that_breaks_off_leaves_nothing(serve):
    live = await serve(say("Hello"))
    kept = await upload(live, b"{}\n")

    async def endless():
        yield PURPOSE + HEAD + b"\r\n"
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0.01)

    sending = asyncio.create_task(
        live.session.post(f"{live.url}/v1/files", data=endless(), headers={"Content-Type": FORM})
    )
    await eventually(lambda: len(stored(live)) == 2)
    sending.cancel()
    await eventually(lambda: stored(live) == [kept])


async def test_files_survive_a_restart_and_leftovers_do_not(serve, tmp_path):
    first = await serve(say("Hello"), data_dir=str(tmp_path))
    file_id = await upload(first, b"{}\n")
    await first.stop()
    for name in ("file-0123456789abcdef0123456789abcdef", f"{file_id}.part", "file-" + "1" * 32 + ".part"):
        (tmp_path / "files" / name).write_bytes(b"left")
    (tmp_path / "files" / "notes.txt").write_bytes(b"not ours")
    (tmp_path / "files" / f"{file_id}.part").unlink()
    second = await serve(say("Hello"), data_dir=str(tmp_path))
    assert await content(second, file_id) == (200, b"{}\n")
    assert sorted(os.listdir(tmp_path / "files")) == sorted([file_id, "notes.txt"])


async def test_expired_files_are_gone(serve, tmp_path):
    late = [0.0]
    live = await serve(say("Hello"), data_dir=str(tmp_path), now=lambda: time.time() + late[0])
    fields = (
        ("purpose", "batch"),
        ("expires_after[anchor]", "created_at"),
        ("expires_after[seconds]", "3600"),
    )
    file_id, kept = await upload(live, b"{}\n", fields=fields), await upload(live, b"{}\n")
    assert (await content(live, file_id))[0] == 200
    late[0] = 3601.0
    assert (await content(live, file_id))[0] == 404
    assert [x["id"] for x in (await live.get("/v1/files"))[1]["data"]] == [kept]
    await live.stop()
    await upload(
        await serve(say("Hello"), data_dir=str(tmp_path), now=lambda: time.time() + late[0]), b"{}\n"
    )
    assert not (tmp_path / "files" / file_id).exists()


async def test_one_directory_has_one_server(serve, tmp_path):
    first = await serve(say("Hello"), data_dir=str(tmp_path))
    await upload(first, b"{}\n")
    with pytest.raises(InUse, match="in use by another server"):
        check_data_dir(ServerConfig(data_dir=str(tmp_path)))
    second = await serve(say("Hello"), data_dir=str(tmp_path))
    status, answer = await send(second, b"{}\n")
    assert (status, answer["error"]["code"]) == (503, "data_dir_in_use")
    await first.stop()
    assert len((await second.get("/v1/files"))[1]["data"]) == 1


async def test_files_can_be_switched_off(serve):
    live = await serve(say("Hello"), data_dir="none")
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/file-0/content")):
        status, answer = await live.request(method, path)
        assert (status, answer["error"]["code"]) == (404, "files_off")
    assert (await send(live, b"{}\n"))[1]["error"]["code"] == "files_off"


async def test_a_directory_that_cannot_be_used_is_told_before_the_model_loads(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / DATABASE).write_bytes(b"no database" * 1000)
    for name, problem in (("other", "holds other files"), ("file", "file"), ("broken", "not a database")):
        with pytest.raises(ConfigError, match=problem):
            check_data_dir(ServerConfig(data_dir=str(tmp_path / name)))
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) != 0o700
    config: Any = None
    with pytest.raises(ConfigError, match="holds other files"):
        run(config, ServerConfig(port=0, data_dir=str(tmp_path / "other")))


async def test_each_model_has_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    names = ["demo", "../../etc", "org/name", "org_name", "", "x" * 500, ".hidden"]
    places = [data_directory(ServerConfig(), name) for name in names]
    assert len(set(places)) == len(names)
    for place in places:
        assert place is not None
        assert place.parent == tmp_path / "tierax"
        assert len(place.name) < 100
    assert data_directory(ServerConfig(data_dir="none"), "demo") is None
    assert not any(tmp_path.iterdir())


async def test_a_database_of_another_format_is_refused(tmp_path):
    Store(tmp_path / "d", 10, time.time).close()
    import sqlite3

    with sqlite3.connect(tmp_path / "d" / DATABASE) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match="another version of tierax"):
        Store(tmp_path / "d", 10, time.time)
