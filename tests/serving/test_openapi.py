"""`/openapi.json` tells of every route, and answers are what it says (as the types themselves see it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from aiohttp import FormData
from aiohttp.test_utils import make_mocked_request

from helpers.batch_client import finished
from helpers.fake_engine import FakeEngine, FakeEngineThread, say
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES, Live
from tierax.serving.app import make_app
from tierax.serving.config import ServerConfig
from tierax.serving.http.auth import OPEN_ROUTES
from tierax.serving.openapi.document import JSON, document, documented_routes, entry_of

pytestmark = pytest.mark.asyncio

EXEMPT: dict[str, str] = {}
"""Paths that need no `@Documented`, each with the reason."""

Route = tuple[str, str]
EXAMPLES: list[tuple[Route, dict[str, Any] | None]] = [
    (("POST", CHAT), {"messages": MESSAGES}),
    (("POST", CHAT), {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    (
        ("POST", CHAT),
        {"messages": MESSAGES, "n": 2, "stream": True, "stream_options": {"include_usage": True}},
    ),
    (("POST", CHAT), {"messages": MESSAGES, "logprobs": True, "return_token_ids": True, "stream": True}),
    (("POST", COMPLETIONS), {"prompt": ["a", "b"], "logprobs": 2, "return_token_ids": True}),
    (("POST", COMPLETIONS), {"prompt": [65], "stream": True, "stream_options": {"include_usage": True}}),
    (("POST", COMPLETIONS), {"prompt": "a", "echo": True, "max_tokens": 0}),
    (("GET", "/v1/models"), None),
    (("GET", "/v1/models/fake"), None),
    (("GET", "/health"), None),
    (("GET", "/ready"), None),
    (("GET", "/version"), None),
    (("GET", "/openapi.json"), None),
    (("POST", "/flush_cache?tier=device&timeout=0"), None),
    (("POST", "/cache/clear"), {"tier": "device"}),
    (("GET", "/cache/stat"), None),
    (("GET", "/cache/pins"), None),
    (("POST", "/cache/warm"), {"prompts": ["hello there", [1, 2]]}),
    (("POST", CHAT), {"messages": MESSAGES, "prompt_logprobs": 1}),
    (("POST", COMPLETIONS), {"prompt": "ab", "prompt_logprobs": 1, "stream": True}),
    (("POST", "/v1/responses"), {"input": "Hi", "include": ["message.output_text.logprobs"]}),
    (("POST", "/v1/responses"), {"input": "Hi", "max_output_tokens": 2, "metadata": {"a": "b"}}),
    (("POST", "/v1/responses"), {"input": "Hi", "include": ["message.output_text.logprobs"], "stream": True}),
    (("POST", "/v1/messages"), {"messages": MESSAGES, "max_tokens": 20}),
    (("POST", "/v1/messages"), {"messages": MESSAGES, "max_tokens": 2, "stream": True}),
    (("POST", "/v1/messages/count_tokens"), {"messages": MESSAGES}),
    (("POST", "/v1/embeddings"), {"input": ["a", "b"]}),
    (("POST", "/v1/embeddings"), {"input": [65], "encoding_format": "base64"}),
    (("POST", "/tokenize"), {"prompt": "ab", "return_token_strs": True}),
    (("POST", "/tokenize"), {"prompt": ["ab", "c"]}),
    (("POST", "/detokenize"), {"tokens": [65, 66]}),
    (
        ("POST", "/generate"),
        {"text": "a", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1},
    ),
    (("POST", "/generate"), {"text": ["a", "b"]}),
    (("POST", "/generate"), {"text": "a", "stream": True, "sampling_params": {"n": 2}}),
    (("POST", "/abort_request"), {"rid": "nobody"}),
    (("GET", "/model_info"), None),
    (("GET", "/server_info"), None),
    (("GET", "/load"), None),
    (("GET", "/v1/files"), None),
    (("GET", "/v1/batches"), None),
    (("GET", "/metrics"), None),
    (("GET", "/dashboard"), None),
    (("GET", "/dashboard/data"), None),
    (("GET", "/dashboard/tree?nodes=5"), None),
]


def app_of(**config: Any) -> Any:
    return make_app(FakeEngineThread(FakeEngine()), ServerConfig(**config))


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


async def test_every_route_is_documented():
    for route in documented_routes(app_of().router):
        assert route.resource is not None
        path = route.resource.canonical
        if path in EXEMPT:
            continue
        place = f"{route.method} {path} ({route.handler.__module__}.{route.handler.__qualname__})"
        assert entry_of(route.handler) is not None, (
            f"{place} is missing in /openapi.json: put `@Documented(body=…, answer=…)` of serving/openapi/document.py over"
            " the handler. Types of bodies are msgspec structs; those of answers TypedDicts, as in serving/openai/answers.py."
        )
        assert (route.handler.__doc__ or "").strip(), (
            f"{place} needs a docstring: its first line is the summary"
        )


async def test_the_document_is_sound():
    app = app_of(api_key="right")
    told = json.loads(msgspec.json.encode(document(app)))
    assert told["openapi"] == "3.1.0"
    operations = [
        (method, path, told["paths"][path][method])
        for path in told["paths"]
        for method in told["paths"][path]
    ]
    assert len(operations) == len(list(documented_routes(app.router)))
    names = [operation["operationId"] for _, _, operation in operations]
    assert len(set(names)) == len(names)
    for _, path, operation in operations:
        parameters = {told["name"] for told in operation.get("parameters", []) if told["in"] == "path"}
        assert parameters == {part[1:-1] for part in path.split("/") if part.startswith("{")}
        assert operation["summary"].endswith("."), operation
    for reference in references(told):
        _, _, kind, name = reference.split("/")
        assert name in told["components"][kind], reference


async def test_security_is_told():
    locked = document(app_of(api_key="right"))
    for path, methods in locked["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path not in OPEN_ROUTES), path
    unlocked = document(app_of())
    assert not any(
        "security" in operation for path in unlocked["paths"].values() for operation in path.values()
    )


async def test_it_is_served_behind_the_key(serve):
    live = await serve(api_key="right")
    status, answer = await live.get("/openapi.json")
    assert (status, answer["error"]["code"]) == (401, "missing_api_key")
    status, answer = await live.get("/openapi.json", headers={"Authorization": "Bearer right"})
    assert status == 200
    assert answer == json.loads(msgspec.json.encode(document(live.app)))
    chat = answer["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat == {"$ref": "#/components/schemas/ChatBody"}
    assert "messages" in answer["components"]["schemas"]["ChatBody"]["required"]


async def fetch(live: Live, route: Route, body: Any) -> tuple[int, str, bytes]:
    method, path = route
    async with live.session.request(method, live.url + path, json=body) as response:
        return response.status, response.content_type, await response.read()


def assert_is(raw: bytes | str, kind: Any) -> None:
    """The JSON is of this type, and has no field that the type does not know."""
    assert msgspec.to_builtins(msgspec.json.decode(raw, type=kind)) == msgspec.json.decode(raw)


@pytest.mark.parametrize(("route", "body"), EXAMPLES)
async def test_answers_have_the_types_of_the_document(serve, route, body):
    live = await serve(say("héllo"))
    status, media, raw = await fetch(live, route, body)
    assert status == 200, raw
    entry = entry_of(await handler_of(live, route))
    assert entry is not None
    if media == "text/event-stream":
        events = [
            line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")
        ]
        assert len(events) > 2
        for event in events:
            if event != "[DONE]":
                assert_is(event, entry.events)
    else:
        assert media == entry.media
        if media == JSON:
            assert_is(raw, entry.answer)


async def test_what_is_kept_has_the_types_of_the_document(serve):
    live = await serve(say("héllo"))
    _, made = await live.post("/v1/responses", {"input": "Hi"})
    kept = f"/v1/responses/{made['id']}"
    form = FormData({"purpose": "batch"})
    line = {"custom_id": "1", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "a", "max_tokens": 2}}
    form.add_field("file", json.dumps(line).encode(), filename="in.jsonl")
    async with live.session.post(f"{live.url}/v1/files", data=form) as response:
        uploaded = await response.read()
    entry = entry_of(await handler_of(live, ("POST", "/v1/files")))
    assert entry is not None
    assert_is(uploaded, entry.answer)
    file = f"/v1/files/{json.loads(uploaded)['id']}"
    order = {"input_file_id": json.loads(uploaded)["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    _, batch = await live.post("/v1/batches", order)
    steps: list[tuple[Route, set[int]]] = [
        (("GET", kept), {200}),
        (("GET", f"{kept}/input_items"), {200}),
        (("POST", f"{kept}/cancel"), {400}),
        (("DELETE", kept), {200}),
        (("GET", file), {200}),
        (("GET", f"{file}/content"), {200}),
        (("GET", "/v1/files"), {200}),
        (("GET", f"/v1/batches/{batch['id']}"), {200}),
        (("GET", "/v1/batches"), {200}),
        # Too late, if the line has been answered meanwhile.
        (("POST", f"/v1/batches/{batch['id']}/cancel"), {200, 400}),
        # Refused while the batch still reads it.
        (("DELETE", file), {200}),
    ]
    for route, expected in steps:
        if route == ("DELETE", file):
            await finished(live, batch["id"])
        status, media, raw = await fetch(live, route, None)
        assert status in expected, raw
        entry = entry_of(await handler_of(live, route))
        assert entry is not None
        if media == JSON:
            assert_is(raw, entry.answer if status == 200 else entry.error)


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        (("POST", CHAT), {"messages": []}, 400),
        (("POST", CHAT), {"messages": MESSAGES, "model": "x"}, 404),
        (("GET", "/v1/models/x"), None, 404),
        (("POST", "/cache/clear"), {}, 400),
        (("POST", "/v1/messages"), {"messages": MESSAGES}, 400),
        (("POST", "/v1/messages"), {"messages": MESSAGES, "max_tokens": 1, "model": "x"}, 404),
        (("POST", "/v1/responses"), {"input": []}, 400),
        (("GET", "/v1/responses/resp-x"), None, 404),
        (("GET", "/v1/files/file-x"), None, 404),
        (("POST", "/v1/batches"), {"input_file_id": "x"}, 400),
        (("POST", "/flush_cache?timeout=x"), None, 400),
    ],
)
async def test_errors_have_the_type_of_the_document(serve, route, body, expected):
    live = await serve(say("x"))
    status, _, raw = await fetch(live, route, body)
    assert status == expected, raw
    entry = entry_of(await handler_of(live, route))
    assert entry is not None
    assert_is(raw, entry.error)


async def handler_of(live: Live, route: Route) -> Any:
    method, path = route
    return (await live.app.router.resolve(make_mocked_request(method, path.partition("?")[0]))).handler
