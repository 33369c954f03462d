"""Who may do what, and what nobody may see: keys, tenants, TLS, origins, logs (DEFECTS h5)."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientConnectionError, ClientSession, TCPConnector, web

from helpers.fake_engine import FakeEngine, FakeEngineThread, say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live, events_of
from tierax.engine.config import ConfigError
from tierax.serving.app import make_app
from tierax.serving.config import ServerConfig
from tierax.serving.http import auth
from tierax.serving.http.auth import ApiKey, load_keys
from tierax.serving.server import bind, make_runner, tls_context

pytestmark = pytest.mark.asyncio

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
SECRET = "opensesame"
OPEN_ROUTES = {"/health", "/ready"}
"""Written down here again: another one that opens is a mistake."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def paths_of(live: Live) -> set[str]:
    """Every path of the server's router, with something in the place of its parameters."""
    resources = [route.resource for route in live.app.router.routes()]
    return {re.sub(r"\{[^}]*\}", "x", resource.canonical) for resource in resources if resource is not None}


# --- keys


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"X-Api-Key": "wrong"}, {"Cookie": "tierax_dashboard=x"}]
)
async def test_no_method_of_any_route_works_without_a_key(serve, headers):
    live = await serve(say("x"), api_key="right", admin_key="admin", metrics_key="metrics")
    paths = paths_of(live)
    assert {CHAT, "/metrics", "/flush_cache", *OPEN_ROUTES} <= paths
    for path in [*paths, "//v1/models", "/v1/%6dodels", "/nope", "/health/x", "/health/../v1/models"]:
        for method in METHODS:
            if path in OPEN_ROUTES and method in ("GET", "HEAD"):
                continue
            async with live.session.request(method, live.url + path, headers=headers) as response:
                assert response.status == 401, (method, path)
                if method != "HEAD" and response.content_type == "application/json":
                    assert (await response.json())["error"]["type"]
    assert live.engine.made == []
    for path in OPEN_ROUTES:
        assert (await live.get(path, headers=headers))[0] == 200


async def test_what_each_kind_of_key_opens(serve):
    live = await serve(say("x"), api_key="user", admin_key="admin", metrics_key="metrics")

    async def status(method: str, path: str, key: str) -> int:
        body = {"prompt": "hi"} if path == COMPLETIONS else None
        async with live.session.request(method, live.url + path, headers=bearer(key), json=body) as response:
            return response.status

    expected = {
        ("GET", "/v1/models"): {"user": 200, "admin": 200, "metrics": 403},
        ("POST", COMPLETIONS): {"user": 200, "admin": 200, "metrics": 403},
        ("GET", "/cache/pins"): {"user": 200, "admin": 200, "metrics": 403},
        ("GET", "/metrics"): {"user": 403, "admin": 200, "metrics": 200},
        ("GET", "/cache/stat"): {"user": 403, "admin": 200, "metrics": 403},
        ("POST", "/flush_cache"): {"user": 403, "admin": 200, "metrics": 403},
    }
    found = {
        route: {key: await status(*route, key) for key in statuses} for route, statuses in expected.items()
    }
    assert found == expected


async def test_an_admin_key_alone_guards_what_concerns_everybody(serve):
    live = await serve(say("x"), admin_key="admin")
    # Clients that send any key are let in as on every open server.
    for headers in ({}, bearer("whatever")):
        assert (await live.get("/v1/models", headers=headers))[0] == 200
        assert (await live.post("/flush_cache", None, headers=headers))[0] == 401
    assert (await live.post("/flush_cache", None, headers=bearer("admin")))[0] == 200


async def test_a_metrics_key_alone_guards_the_metrics(serve):
    live = await serve(say("x"), metrics_key="metrics")
    for headers, status in (({}, 401), (bearer("wrong"), 401), (bearer("metrics"), 200)):
        async with live.session.get(live.url + "/metrics", headers=headers) as response:
            assert response.status == status
    assert (await live.get("/v1/models"))[0] == 200


async def test_every_key_is_compared_whichever_it_was(serve, monkeypatch):
    compared = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return hmac.compare_digest(given, key)

    live = await serve(say("x"), api_key=("one", "two", "three"))
    monkeypatch.setattr(auth, "hmac", type("Watched", (), {"compare_digest": staticmethod(compare)}))
    for key in ("one", "three", "none of them"):
        compared.clear()
        await live.get("/v1/models", headers=bearer(key))
        assert compared == [b"one", b"two", b"three"]


async def test_a_key_file_as_a_list(tmp_path: Path):
    path = tmp_path / "keys.json"
    rows = [
        {"key": "a", "tenant": "red", "max_concurrency": 3},
        {"key": "b", "cache_salt": "red"},
        {"key": "c"},
    ]
    path.write_text(json.dumps(rows))
    keys = load_keys(ServerConfig(api_key_file=str(path), admin_key="boss"))
    assert keys == (ApiKey("boss", role="admin"), ApiKey("a", "red", 3), ApiKey("b", "red"), ApiKey("c"))
    for bad, complaint in (
        ([{"key": "a", "tenant": "x", "cache_salt": "y"}], "mean the same"),
        ([{"key": "a", "tennant": "x"}], "tennant"),
        ([{"key": "a", "max_concurrency": 0}], "max_concurrency"),
        ([{"key": "two words"}], "key"),
        ([{"key": "boss"}], "given twice"),
        ([], "holds no key"),
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match=complaint) as refused:
            load_keys(ServerConfig(api_key_file=str(path), admin_key="boss"))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", ["admin_key", "metrics_key"])
async def test_empty_keys_are_refused(field):
    with pytest.raises(ConfigError, match=field):
        ServerConfig(**cast(Any, {field: " "}))


# --- tenants


async def test_tenants_share_nothing_and_a_salt_narrows_only(serve, tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("red-1 red\nred-2 red\nblue-1 blue\nplain\n")
    live = await serve(say("x"), api_key_file=str(path))

    async def cached(key: str, salt: str | None = None) -> int:
        status, answer = await live.post(
            COMPLETIONS, {"prompt": "a long prompt", "cache_salt": salt}, headers=bearer(key)
        )
        assert status == 200
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached("red-1") == 0
    assert await cached("red-1") > 0, "the control: it is cached"
    assert await cached("red-2") > 0, "two keys, one tenant"
    for key in ("blue-1", "plain"):
        for salt in (None, "red", "key:\x00\x00\x00\x03red"):
            assert await cached(key, salt) == 0, (key, salt)
    assert await cached("red-1", "mine") == 0
    assert await cached("red-2", "mine") > 0
    assert await cached("plain", "mine") == 0
    assert await cached("red-1") > 0


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return cert, key


async def test_https(certificate):
    cert, key = certificate
    config = ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key))
    thread = FakeEngineThread(FakeEngine(say("hello")))
    thread.start()
    runner = make_runner(make_app(thread, config))
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    await web.SockSite(runner, listener, ssl_context=tls_context(config)).start()
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    trust = ssl.create_default_context(cafile=str(cert))
    try:
        async with ClientSession(connector=TCPConnector(ssl=trust)) as session:
            body = {"messages": MESSAGES, "stream": True}
            async with session.post(f"https://{place}{CHAT}", json=body) as response:
                events = events_of(await response.text())
            with pytest.raises(ClientConnectionError):
                await session.get(f"http://{place}/health")
    finally:
        await runner.cleanup()
        await asyncio.to_thread(thread.close, 1.0)
    assert (
        "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
        == "hello"
    )


async def test_certificates_that_cannot_be_used(certificate, tmp_path: Path):
    cert, key = certificate
    with pytest.raises(ConfigError, match="ssl_keyfile: give ssl_certfile"):
        ServerConfig(ssl_keyfile=str(key))
    locked, nonsense = tmp_path / "locked.pem", tmp_path / "nonsense.pem"
    command = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    nonsense.write_text("nonsense")
    for files, complaint in (
        ((str(cert), str(tmp_path / "none")), "No such file"),
        ((str(cert), str(nonsense)), "ssl_certfile"),
        ((str(cert), str(cert)), "ssl_certfile"),
        ((str(cert), str(locked)), "password"),
    ):
        with pytest.raises(ConfigError, match=complaint) as refused:
            tls_context(ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1]))
        assert "\n" not in str(refused.value)


# --- pages of other origins


async def test_browsers_keep_other_origins_out_by_default(serve):
    live = await serve(say("x"))
    for method, path in (("OPTIONS", CHAT), ("GET", "/v1/models"), ("GET", "/nope")):
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        async with live.session.request(method, live.url + path, headers=headers) as response:
            assert not [name for name in response.headers if name.lower().startswith("access-control")]
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Server"] == "tierax"


async def test_named_origins_may_call(serve):
    live = await serve(say("x"), api_key="k", cors_origin="https://a.example")
    origin = {"Origin": "https://a.example"}
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with live.session.options(live.url + CHAT, headers=origin | ask) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Credentials" not in response.headers
    async with live.session.options(
        live.url + CHAT, headers=ask | {"Origin": "https://b.example"}
    ) as response:
        assert response.status == 401
        assert "Access-Control-Allow-Origin" not in response.headers
    body = {"messages": MESSAGES, "stream": True}
    for headers, status in ((origin | bearer("k"), 200), (origin, 401)):
        async with live.session.post(live.url + CHAT, json=body, headers=headers) as response:
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example/path", "", "https://a b"])
async def test_origins_that_match_nothing_are_refused(origin):
    with pytest.raises(ConfigError, match="cors_origin"):
        ServerConfig(cors_origin=(origin,))


# --- what is told of requests


async def test_the_requests_id_comes_back_if_it_is_fit_for_a_log(serve):
    live = await serve(say("x"))

    async def id_of(given: str | None, path: str = "/v1/models") -> str:
        async with live.session.get(
            live.url + path, headers={"x-request-id": given} if given else {}
        ) as response:
            return response.headers["x-request-id"]

    assert await id_of("call-7/a_b:c.d=") == "call-7/a_b:c.d="
    assert await id_of("call-8", "/nope") == "call-8"
    for unfit in ("a b", "x" * 129, '"><script>', "ключ"):
        assert re.fullmatch("[0-9a-f]{32}", await id_of(unfit))
    assert await id_of(None) != await id_of(None)
    async with live.session.post(
        live.url + CHAT, json={"messages": MESSAGES, "stream": True}, headers={"x-request-id": "s"}
    ) as response:
        assert response.headers["x-request-id"] == "s"


async def test_what_clients_write_is_in_no_log_and_no_metric(
    serve, caplog: pytest.LogCaptureFixture, monkeypatch
):
    caplog.set_level(logging.INFO)
    live = await serve(say("x"), api_key="k")
    key = bearer("k")
    fields = {"user": SECRET, "cache_salt": SECRET, "metadata": {"a": SECRET}, SECRET: 1}
    await live.post(CHAT, {"messages": [{"role": "user", "content": SECRET}]} | fields, headers=key)
    for body in (
        {"messages": [{"role": SECRET, "content": "x"}]},
        {"messages": SECRET},
        {"messages": MESSAGES, "model": SECRET},
        {"messages": MESSAGES, "stop": [SECRET, 5]},
        {"messages": MESSAGES, "logit_bias": {SECRET: 1}},
        b"{" + SECRET.encode(),
    ):
        status, _ = await live.post(CHAT, body, headers=key)
        assert 400 <= status < 500
    for path in (
        f"/{SECRET}",
        f"/v1/models/{SECRET}",
        f"/v1/models?{SECRET}=1",
        f"/cache/stat?tier={SECRET}",
    ):
        await live.get(path, headers=key)
        await live.get(path)
    await live.get("/v1/models", headers=bearer(SECRET))
    for raw in (
        f"{SECRET} /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        f"GET /v1/models {SECRET}\r\n\r\n",
        f"GET /{SECRET}\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {SECRET}\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nTransfer-Encoding: chunked\r\n\r\n{SECRET}\r\n",
        f"GET / HTTP/1.1\r\n{SECRET}\r\n\r\n",
    ):
        assert await say_raw(live, raw.encode()) != b""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(f"cannot encode {SECRET}")

    monkeypatch.setattr(live.engine.tokenizer, "encode", broken)
    assert (await live.post(COMPLETIONS, {"prompt": SECRET}, headers=key))[0] == 500
    await asyncio.sleep(0.05)
    assert "ZeroDivisionError" in caplog.text, "the control: the fault is told of"
    assert '"POST /v1/chat/completions" 200' in caplog.text, "the control: answers are told of"
    assert SECRET not in caplog.text
    async with live.session.get(live.url + "/metrics", headers=key) as response:
        text = await response.text()
    assert 'route="/v1/models/{model}"' in text
    assert SECRET not in text


async def say_raw(live: Live, data: bytes) -> bytes:
    """What comes back for these very bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(live.url.rsplit(":", 1)[1]))
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(2**16), 5)
    writer.close()
    await writer.wait_closed()
    return answer
