"""The dashboard: who may see it, and what it is told."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from helpers.live_server import Live, eventually
from helpers.tiered_engine import TieredEngine
from tierax.engine.stats import EngineStats
from tierax.serving.dashboard.history import POINTS, History
from tierax.serving.dashboard.session import COOKIE, LIFETIME, MOST, Sessions

pytestmark = pytest.mark.asyncio

PROMPT = "abcdefghijklmnopqrstuvwxyz012345"
"""Eight pages of four tokens."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def settled(live: Live) -> None:
    await eventually(lambda: live.thread.engine.loop.idle)


# Who may see it.


async def test_nothing_without_a_key_but_the_page_that_asks_for_it(serve):
    live = await serve(api_key="secret")
    async with live.session.get(live.url + "/dashboard") as response:
        assert response.status == 401
        assert response.content_type == "text/html"
        text = await response.text()
    assert 'type="password"' in text
    assert "fake" not in text
    for method, path in (
        *(("GET", "/dashboard/data"), ("GET", "/dashboard/tree"), ("POST", "/dashboard/login")),
        *(
            ("POST", "/dashboard/logout"),
            ("POST", "/dashboard"),
            ("GET", "/dashboard/"),
            ("HEAD", "/dashboard"),
        ),
    ):
        async with live.session.request(method, live.url + path) as response:
            assert response.status == 401, path
            assert "Set-Cookie" not in response.headers


async def test_a_key_opens_it_and_the_cookie_stands_for_the_key(serve):
    live = await serve(api_key="secret")
    async with live.session.post(live.url + "/dashboard/login", headers=bearer("wrong")) as response:
        assert response.status == 401
    async with live.session.post(live.url + "/dashboard/login", headers=bearer("secret")) as response:
        assert response.status == 204
        cookie = response.headers["Set-Cookie"]
    assert "secret" not in cookie
    for part in ("HttpOnly", "SameSite=Strict", "Path=/dashboard", f"Max-Age={int(LIFETIME)}"):
        assert part in cookie
    headers = {"Cookie": cookie.partition(";")[0]}
    async with live.session.get(live.url + "/dashboard", headers=headers) as response:
        assert response.status == 200
        assert "Radix tree" in await response.text()
    status, data = await live.get("/dashboard/data", headers=headers)
    assert (status, data["logged_in"]) == (200, True)
    # Elsewhere it is worth nothing, even if it is sent.
    for path in ("/v1/models", "/metrics", "/cache/stat", "/dashboards"):
        assert (await live.get(path, headers=headers))[0] == 401, path
    async with live.session.post(live.url + "/dashboard/logout", headers=headers) as response:
        assert response.status == 204
        assert response.headers["Set-Cookie"].startswith(f'{COOKIE}=""')
    assert (await live.get("/dashboard/data", headers=headers))[0] == 401


async def test_tenants_do_not_see_it(serve, tmp_path):
    (tmp_path / "keys").write_text("operator\ntenant salt\n")
    live = await serve(api_key_file=str(tmp_path / "keys"))
    for path in ("/dashboard/data", "/dashboard/tree"):
        assert (await live.get(path, headers=bearer("tenant")))[0] == 403
        assert (await live.get(path, headers=bearer("operator")))[0] == 200
    async with live.session.post(live.url + "/dashboard/login", headers=bearer("tenant")) as response:
        assert response.status == 403
        assert "Set-Cookie" not in response.headers
    async with live.session.get(live.url + "/dashboard", headers=bearer("tenant")) as response:
        assert response.status == 403
        assert 'type="password"' in await response.text()


@pytest.mark.parametrize(
    ("config", "answers"),
    [
        ({"admin_key": "admin"}, {None: 401, "other": 401, "admin": 200}),
        ({"admin_key": "admin", "api_key": "key"}, {None: 401, "other": 401, "key": 403, "admin": 200}),
        ({"metrics_key": "metrics", "api_key": "key"}, {None: 401, "metrics": 403, "key": 200}),
    ],
)
async def test_where_keys_have_purposes_only_the_operator_s_opens_it(serve, config, answers):
    live = await serve(**config)
    for key, expected in answers.items():
        headers = {} if key is None else bearer(key)
        for path in ("/dashboard", "/dashboard/data", "/dashboard/tree"):
            async with live.session.get(live.url + path, headers=headers) as response:
                assert response.status == expected, (key, path)
        async with live.session.post(live.url + "/dashboard/login", headers=headers) as response:
            assert response.status == (204 if expected == 200 else expected)
            assert ("Set-Cookie" in response.headers) is (expected == 200)


async def test_an_open_server_asks_for_nothing(serve):
    live = await serve()
    async with live.session.get(live.url + "/dashboard") as response:
        assert response.status == 200
        policy = response.headers["Content-Security-Policy"]
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        text = await response.text()
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    # Nothing from elsewhere, and no handlers or styles in the markup.
    assert not re.search(r"(?:src|href)\s*=|\son\w+\s*=\s*[\"']|\sstyle\s*=|https?://|@import|url\(", text)
    async with live.session.post(live.url + "/dashboard/login") as response:
        assert response.status == 204
        assert "Set-Cookie" not in response.headers


class Client:
    """The little that `Sessions` asks of a request and its answer."""

    def __init__(self, token: str = "", path: str = "/dashboard/data", *, secure: bool = False) -> None:
        self.cookies = {COOKIE: token} if token else {}
        self.path = path
        self.secure = secure
        self.given: dict[str, Any] = {}

    def set_cookie(self, name: str, value: str, **options: Any) -> None:
        self.given = {"name": name, "value": value, **options}


def login(sessions: Sessions, key: str, *, secure: bool = False) -> dict[str, Any]:
    client: Any = Client(secure=secure)
    sessions.open(client, client, key)
    return client.given


async def test_logins_end_by_themselves():
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    cookie = login(sessions, "k", secure=True)
    assert cookie["secure"] is True
    assert login(sessions, "k")["secure"] is False

    def key(path: str = "/dashboard/data", token: str = cookie["value"]) -> str | None:
        client: Any = Client(token, path)
        return sessions.key_of(client)

    assert key() == key("/dashboard") == "k"
    assert key("/v1/models") is None
    assert key("/dashboardx") is None
    assert key(token="x" * 43) is None
    assert key(token="\udcff") is None
    now[0] = LIFETIME - 1
    assert key() == "k"
    now[0] = LIFETIME
    assert key() is None


async def test_logins_are_bounded():
    sessions = Sessions(lambda: 0.0)
    tokens = [login(sessions, str(number))["value"] for number in range(MOST + 1)]
    clients: list[Any] = [Client(token) for token in tokens]
    assert sessions.key_of(clients[0]) is None
    assert sessions.key_of(clients[1]) == "1"
    assert sessions.key_of(clients[-1]) == str(MOST)


# What it is told.


async def test_history_has_rates_and_percentiles():
    now, stats = [100.0], EngineStats()
    times: list[float] = []

    def take() -> list[float]:
        taken = times[:]
        times.clear()
        return taken

    history = History(lambda: stats, take, lambda: now[0])
    stats.generated_tokens, stats.prompt_tokens, stats.cached_tokens = 30, 100, 60
    stats.running, stats.waiting = 3, 4
    times += [0.4, 0.1, 0.2, 0.3]
    now[0] += 2
    history.sample()
    # Nothing has passed since, so there is nothing to tell.
    history.sample()
    now[0] += 1
    history.sample()
    assert history.number == 2
    assert history.since(0) == [
        (2.0, 15.0, 20.0, 30.0, 0.2, 0.4, 3, 4),
        (3.0, 0.0, 0.0, 0.0, None, None, 3, 4),
    ]
    assert history.since(1) == history.since(0)[1:]
    assert history.since(2) == history.since(99) == []


async def test_history_is_bounded():
    now = [0.0]
    history = History(EngineStats, list, lambda: now[0])
    for _ in range(POINTS + 5):
        now[0] += 1
        history.sample()
    assert len(history.since(0)) == POINTS
    assert history.since(0)[0][0] == 6.0
    assert len(history.since(POINTS)) == 5


async def test_data_tells_of_tiers_and_requests(serve):
    engine = TieredEngine()
    live = await serve(engine=engine)
    await live.complete(PROMPT, max_tokens=4)
    await live.complete(PROMPT, max_tokens=4)
    await settled(live)
    engine.mover_stats.load.pages, engine.mover_stats.load.bytes = 3, 3000
    await asyncio.sleep(1.1)
    status, data = await live.get("/dashboard/data")
    assert status == 200
    assert data["model"] == "fake"
    assert data["state"] == "ready"
    assert data["totals"] == {
        "generated": 8,
        "prompt": 64,
        "cached": 28,
        "finished": {"length": 2},
        "retractions": 0,
    }
    assert data["hit_rate"] == 0.4375
    device, host, disk = data["tiers"]
    assert [device["name"], host["name"], disk["name"]] == ["device", "host", "disk"]
    assert device["hit_tokens"] == 28
    assert device["in_use_pages"] == 0
    assert device["used_pages"] == host["used_pages"] == disk["used_pages"] == 8
    assert {(t["from"], t["to"]) for t in data["transfers"]} == {
        *(("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host")),
    }
    load = next(t for t in data["transfers"] if (t["from"], t["to"]) == ("host", "device"))
    assert load == {"from": "host", "to": "device", "pages": 3, "bytes": 3000, "in_flight_pages": 0}
    history = data["history"]
    assert history["number"] >= 1
    columns = history["columns"]
    generated = sum(p[columns.index("output")] for p in history["points"])
    assert generated > 0
    assert any(p[columns.index("ttft_p50")] is not None for p in history["points"])
    assert data["requests"] == {"rows": [], "hidden": 0}
    later = (await live.get(f"/dashboard/data?since={history['number']}"))[1]["history"]
    assert len(later["points"]) == later["number"] - history["number"]


async def test_data_lists_running_and_waiting_requests(serve):
    live = await serve(step_seconds=0.01, max_running=1)
    streams = [await live.open_stream("/v1/completions", prompt="a secret", max_tokens=500) for _ in range(2)]
    await eventually(lambda: live.engine.stats.running == 1 and live.engine.stats.waiting == 1)
    rows = (await live.get("/dashboard/data"))[1]["requests"]["rows"]
    assert [row["status"] for row in rows] == ["running", "waiting"]
    running, waiting = rows
    assert running["prompt"] == 8
    assert running["most"] == 500
    assert running["cached"] == {"device": 0, "host": 0, "disk": 0}
    assert waiting["output"] == 0
    assert waiting["ttft"] is None
    assert waiting["id"].startswith("cmpl-")
    assert running["seconds"] >= 0
    for stream in streams:
        stream.close()
    await eventually(lambda: live.engine.stats.running == 0)


async def test_data_lists_no_more_than_it_should(serve):
    live = await serve(step_seconds=0.05, max_running=1)
    stream = await live.open_stream("/v1/completions", prompt=["x"] * 250, max_tokens=5)
    await eventually(lambda: live.engine.stats.running == 1)
    requests = (await live.get("/dashboard/data"))[1]["requests"]
    assert len(requests["rows"]) == 200
    assert requests["hidden"] == 50
    stream.close()
    await eventually(lambda: live.engine.stats.running == 0)


async def test_an_open_page_does_not_fill_the_log(serve, caplog):
    live = await serve()
    with caplog.at_level("INFO"):
        for path in ("/dashboard/data", "/dashboard/tree", "/dashboard/data?since=x", "/version"):
            await live.get(path)
        # A line comes when its answer has long been read.
        await eventually(lambda: "/version" in caplog.text)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith(".access")]
    assert [re.findall('"(.*?)" ([0-9]+)', line)[0] for line in lines] == [
        ("GET /dashboard/data", "400"),
        ("GET /version", "200"),
    ]


async def test_data_needs_no_engine(serve):
    live = await serve()
    live.thread.is_ready = False
    status, data = await live.get("/dashboard/data")
    assert (status, data["state"]) == (200, "The engine is still warming up.")
    assert (await live.get("/dashboard/tree"))[0] == 503
    live.thread.is_ready = True
    live.thread.kill()
    assert (await live.get("/dashboard/data"))[1]["state"] == "The engine has stopped."
    assert (await live.get("/dashboard/tree"))[0] == 503


@pytest.mark.parametrize(
    "query",
    [
        "data?since=-1",
        "data?since=x",
        "data?since=",
        "data?since=1_0",
        "tree?nodes=20001",
        "tree?nodes=%D9%A1",
    ],
)
async def test_bad_numbers_are_refused(serve, query):
    live = await serve()
    status, answer = await live.get(f"/dashboard/{query}")
    assert status == 400
    assert answer["error"]["param"] == query.partition("?")[2].partition("=")[0]
